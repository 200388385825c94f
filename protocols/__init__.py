"""The protocols between peers. Built on auth, nat and models; imports neither node nor libp2p."""
