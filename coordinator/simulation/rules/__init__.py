"""The update rules in virtual time: what each pull and push does, by the decisions that the cluster's rules run."""
