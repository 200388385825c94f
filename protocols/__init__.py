"""What peers say to each other. Stands on auth, nat and models; knows nothing of node or libp2p."""
