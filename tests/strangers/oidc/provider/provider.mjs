// A real OpenID provider for the tests: oidc-provider with its own development pages, on loopback.
//
// Given on the command line: the port (0: any free one) and the name of the file with its private
// signing keys. Anybody may log in under any name with any password. It ends when its standard
// input closes, however the tests end. The first line that it writes is {"issuer": "http://..."}.

import { readFileSync } from 'node:fs';
import http from 'node:http';
import { Provider } from 'oidc-provider';

const [port, keysFile] = process.argv.slice(2);

const DEVICE = 'urn:ietf:params:oauth:grant-type:device_code';
const REDIRECT = 'https://auth.example.org/login/callback';

const client = (id, more = {}) => ({
  client_id: id,
  token_endpoint_auth_method: 'none',
  grant_types: ['authorization_code', DEVICE],
  redirect_uris: [REDIRECT],
  id_token_signed_response_alg: 'ES256',
  ...more,
});

const secret = { client_secret: 'a secret: with & signs' };
const clients = [
  client('potluck'),
  client('potluck-basic', { ...secret, token_endpoint_auth_method: 'client_secret_basic' }),
  client('potluck-rsa', { id_token_signed_response_alg: 'PS256' }),
  // on the machine of the tests, the auth server has a port that nobody knows beforehand
  client('potluck-loopback', {
    application_type: 'native',
    redirect_uris: ['http://127.0.0.1/login/callback'],
  }),
  client('hurried'), // its device codes live for four seconds: a busy machine asks late
  client('confused'), // its tokens are made for another program: see below
  client('browser-only', { grant_types: ['authorization_code'] }),
];

const configuration = {
  clients,
  jwks: JSON.parse(readFileSync(keysFile, 'utf8')),
  cookies: { keys: ['for tests on loopback only'] },
  scopes: ['openid', 'profile', 'email'],
  claims: {
    openid: ['sub'],
    profile: ['preferred_username'],
    email: ['email', 'email_verified'],
  },
  findAccount: (ctx, id) => ({
    accountId: id,
    claims: () => ({
      sub: id,
      preferred_username: `${id}-online`,
      email: `${id}@example.org`,
      email_verified: true,
    }),
  }),
  features: { deviceFlow: { enabled: true } },
  ttl: {
    AccessToken: 600,
    AuthorizationCode: 60,
    DeviceCode: (ctx, code, owner) => (owner.clientId === 'hurried' ? 4 : 600),
    Grant: 600,
    IdToken: 600,
    Interaction: 600,
    Session: 600,
  },
};

console.warn = () => {}; // its notices that this is no way to run it in earnest: here it is

const server = http.createServer();
server.listen(Number(port), '127.0.0.1', () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, configuration);
  provider.use(async (ctx, next) => {
    await next();
    if (ctx.oidc?.route === 'token' && ctx.oidc.client?.clientId === 'confused' && ctx.body.id_token) {
      const other = await provider.Client.find('potluck');
      const token = new provider.IdToken(await ctx.oidc.account.claims(), { ctx, client: other });
      token.scope = 'openid';
      ctx.body.id_token = await token.issue({ use: 'idtoken' });
    }
  });
  server.on('request', provider.callback());
  process.stdout.write(`${JSON.stringify({ issuer })}\n`);
});

process.stdin.on('end', () => process.exit(0));
process.stdin.resume();
