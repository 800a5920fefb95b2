"""The servers of the cluster, and the connections of the client to them."""
