"""Our own Noise session and Yamux muxer: libp2p's bytes on the wire, several times its speed."""
