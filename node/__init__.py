"""The application: command line, configuration, the networks, the node that holds it together."""
