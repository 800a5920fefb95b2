"""Starting things: the command line `coordinator`, one server, a local cluster of servers, a program in its roles."""
