"""The gRPC edge: what other daemons, schedulers and the command line ask, and how this daemon asks them."""
