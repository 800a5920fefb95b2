"""Recovers lost parameter servers and their variables."""
