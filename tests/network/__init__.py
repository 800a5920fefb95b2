"""Tests of training while the network between its servers is at fault."""
