// A js-libp2p node that does what the tests tell it, and pipes libp2p streams to local sockets.
//
// It promises nothing of its own: whatever a test sends into a socket goes through js-libp2p's
// Noise and Yamux, with its back-pressure, half-close and reset kept. One line of JSON is a
// command and one line is its answer; after `open` was answered the same socket is the stream.
// Each stream that a peer opens to us becomes a new connection to the port that `serve` named,
// opening with one line that says which protocol and whose stream it is.
//
// With the argument `guest` it does not listen, and uses relays. With `relay` it is one, with the
// limits that js-libp2p has by default, and asks and answers AutoNAT v2. The argument after that is
// the address to listen on.
//
// Easy to get wrong: it must not outlive the tests, so it ends when its standard input does.

import net from 'node:net'

// Node 20 lacks it; js-libp2p 3 wants it.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new this((yes, no) => { resolve = yes; reject = no })
  return { promise, resolve, reject }
}

const { createLibp2p } = await import('libp2p')
const { tcp } = await import('@libp2p/tcp')
const { noise } = await import('@chainsafe/libp2p-noise')
const { yamux } = await import('@libp2p/yamux')
const { identify } = await import('@libp2p/identify')
const { ping } = await import('@libp2p/ping')
const { peerIdFromString } = await import('@libp2p/peer-id')
const { multiaddr } = await import('@multiformats/multiaddr')

const { circuitRelayServer, circuitRelayTransport } = await import('@libp2p/circuit-relay-v2')
const { autoNATv2 } = await import('@libp2p/autonat-v2')

const COMMAND_TIMEOUT_MS = 20_000
const KEEP_ALIVE_MS = 200 // short, so that a test of two seconds sees ten Yamux pings answered
const LONGEST_COMMAND_BYTES = 65_536
// A stream that is paused aborts when it holds more than this, by default 4 MiB, though its window
// grows to 16 MiB: a fast sender would be reset for using the window it was given.
const READ_BUFFER_BYTES = 32 * 1024 * 1024

const isGuest = process.argv[2] === 'guest'
const isRelay = process.argv[2] === 'relay'
const address = process.argv[3] ?? '/ip4/127.0.0.1/tcp/0'

const node = await createLibp2p({
  addresses: { listen: isGuest ? [] : [address] },
  transports: isGuest ? [tcp(), circuitRelayTransport()] : [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux({
    enableKeepAlive: true,
    keepAliveInterval: KEEP_ALIVE_MS,
    streamOptions: { maxReadBufferLength: READ_BUFFER_BYTES }
  })],
  services: {
    identify: identify(),
    ping: ping(),
    ...(isRelay ? { relay: circuitRelayServer(), autonat: autoNATv2() } : {})
  },
  connectionMonitor: { enabled: false },
  // By default five connections a second from one address: every test makes one, all from here.
  connectionManager: { inboundConnectionThreshold: 1000 },
  connectionGater: { denyDialMultiaddr: () => false }
})

/** Carry bytes both ways between a libp2p stream and a socket until both directions have ended. */
function pipe (stream, socket) {
  // A socket that was reset, or a stream that was, takes the other with it.
  const broken = error => { stream.abort(error); socket.resetAndDestroy() }

  // Not `for await`, in either direction: on a stream it never ends when the end came before it
  // began, and on a socket it destroys both halves when one has ended.
  const endSocket = () => {
    if (stream.status === 'reset' || stream.status === 'aborted') socket.resetAndDestroy()
    else socket.end()
  }
  const goOn = () => { if (stream.readStatus === 'paused') stream.resume() }
  socket.on('drain', goOn)
  stream.addEventListener('message', event => {
    if (!socket.write(event.data.subarray())) stream.pause()
  })
  stream.addEventListener('close', event => { if (event.error != null) socket.resetAndDestroy() })
  if (stream.readableEnded) endSocket()
  else stream.addEventListener('end', endSocket)

  socket.on('data', chunk => {
    try {
      if (!stream.send(chunk)) {
        socket.pause()
        stream.onDrain().then(() => socket.resume(), broken)
      }
    } catch (error) { broken(error) }
  })
  socket.on('end', () => stream.close().catch(broken))
  socket.on('error', broken)
}

async function knownOf (peer) {
  const signal = AbortSignal.timeout(COMMAND_TIMEOUT_MS)
  while (true) {
    // A peer that dialled us is not in the peer store before identify has put it there.
    const known = await node.peerStore.get(peerIdFromString(peer)).catch(() => null)
    const agent = known?.metadata.get('AgentVersion')
    if (agent != null) {
      return { agent: new TextDecoder().decode(agent), protocols: known.protocols }
    }
    signal.throwIfAborted()
    await new Promise(resolve => setTimeout(resolve, 10))
  }
}

const commands = {
  async describe () {
    return { peer: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) }
  },
  async connect ({ address }) {
    const signal = AbortSignal.timeout(COMMAND_TIMEOUT_MS)
    const connection = await node.dial(multiaddr(address), { signal })
    return { security: connection.encryption, muxer: connection.multiplexer }
  },
  async disconnect ({ peer }) {
    await node.hangUp(peerIdFromString(peer))
    return {}
  },
  async connected () {
    return { peers: node.getConnections().map(connection => connection.remotePeer.toString()) }
  },
  /** How it is connected with a peer: whether through a relay, and with what limits. */
  async links ({ peer }) {
    const connections = node.getConnections(peerIdFromString(peer))
    return {
      links: connections.map(({ remoteAddr, limits }) => ({
        address: remoteAddr.toString(),
        seconds: limits?.seconds ?? null,
        bytes: limits?.bytes == null ? null : Number(limits.bytes)
      }))
    }
  },
  /** Take a place at the relay with this address. */
  async reserve ({ address }) {
    await node.components.transportManager.listen([multiaddr(address).encapsulate('/p2p-circuit')])
    return { addresses: node.getMultiaddrs().map(String) }
  },
  /** Believe that this may be an address of ours, as if a peer had seen us there. */
  async suppose ({ address }) {
    node.components.addressManager.addObservedAddr(multiaddr(address))
    return {}
  },
  async streams ({ peer }) {
    const connections = node.getConnections(peerIdFromString(peer))
    return { count: connections.reduce((sum, connection) => sum + connection.streams.length, 0) }
  },
  async identify ({ peer }) {
    return await knownOf(peer)
  },
  async ping ({ peer }) {
    const signal = AbortSignal.timeout(COMMAND_TIMEOUT_MS)
    return { milliseconds: await node.services.ping.ping(peerIdFromString(peer), { signal }) }
  },
  async serve ({ protocol, port }) {
    const handler = async (stream, connection) => {
      const socket = net.connect({ port, host: '127.0.0.1', allowHalfOpen: true }, () => {
        const peer = connection.remotePeer.toString()
        socket.write(JSON.stringify({ protocol, peer }) + '\n')
        pipe(stream, socket)
      })
      socket.once('error', error => stream.abort(error))
    }
    await node.handle(protocol, handler, {
      maxInboundStreams: 1000, maxOutboundStreams: 1000, runOnLimitedConnection: true, force: true
    })
    return {}
  },
  async unserve ({ protocol }) {
    await node.unhandle(protocol)
    return {}
  }
}

async function open ({ peer, protocol }) {
  const signal = AbortSignal.timeout(COMMAND_TIMEOUT_MS)
  return await node.dialProtocol(peerIdFromString(peer), protocol, {
    signal, maxOutboundStreams: 1000, runOnLimitedConnection: true
  })
}

/** The first line of a socket, and what came after it. */
async function firstLine (socket) {
  let held = Buffer.alloc(0)
  while (true) {
    const end = held.indexOf(10)
    if (end >= 0) return [held.subarray(0, end), held.subarray(end + 1)]
    if (held.length > LONGEST_COMMAND_BYTES) throw new Error('the command has no end')
    const chunk = await new Promise((resolve, reject) => {
      socket.once('readable', () => resolve(socket.read()))
      socket.once('error', reject)
    })
    if (chunk === null) return [held, Buffer.alloc(0)]
    held = Buffer.concat([held, chunk])
  }
}

const control = net.createServer({ allowHalfOpen: true }, async socket => {
  const answer = what => socket.write(JSON.stringify(what) + '\n')
  socket.on('error', () => {}) // a test that ended closes its sockets as it likes
  try {
    const [line, rest] = await firstLine(socket)
    const { command, ...given } = JSON.parse(line)
    if (command === 'open') {
      const stream = await open(given)
      answer({ ok: {} })
      if (rest.length > 0) socket.unshift(rest)
      pipe(stream, socket)
    } else {
      answer({ ok: await commands[command](given) })
      socket.end()
    }
  } catch (error) {
    answer({ error: { name: error.name, message: String(error.message) } })
    socket.end()
  }
})

control.listen(0, '127.0.0.1', () => {
  console.log(JSON.stringify({ control: control.address().port }))
})
process.stdin.resume()
process.stdin.on('end', () => process.exit(0))
