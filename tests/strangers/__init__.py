"""Other people's libp2p: js-libp2p and go-libp2p talk with our node, in both directions.

Our Noise session and Yamux muxer are our own code, so only a stranger can prove them right.
"""
