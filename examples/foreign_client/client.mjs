// A client that was written from the RFCs alone: Node 20, nothing but its standard library.
//
//   node client.mjs open ../../docs/vectors/sealed.json      seals and opens the published vectors
//   node client.mjs ask < request.json                       asks a node through relay and gateway
//
// It shows that the wire format is a standard one. It believes whatever keys it is told and verifies neither log nor evidence,
// so it is no client for secrets. Node 20 has no ML-KEM, so it seals to X25519, as any older client does.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

import { decodeResponse, encodeRequest } from "./bhttp.mjs";
import { KEM_X25519 } from "./hpke.mjs";
import { REQUEST_TYPE, RESPONSE_TYPE, chooseKey, openResponse, sealRequest, sealWith } from "./ohttp.mjs";

const hex = (string) => Buffer.from(string, "hex");

// Requests are padded to 4^n KiB, so that their length tells little.
function bucket(length) {
  let bytes = 1024;
  while (bytes < length) bytes *= 4;
  return bytes;
}

// Lines of an event stream that say something, or the whole content where it is none.
function saidIn({ fields, content }) {
  const type = fields.find(([name]) => name === "content-type")?.[1] ?? "";
  if (!type.startsWith("text/event-stream")) return [content.toString().trim()];
  return content.toString().split("\n").filter((line) => line !== "" && !line.startsWith(":"));
}

function check(name, what, holds) {
  if (!holds) throw new Error(`${name}: ${what} differs`);
}

function openVector(vector) {
  const { name, kem_id: kemId } = vector;
  const message = hex(vector.request);
  const configuration = hex(vector.key_configuration);
  const key = { keyId: configuration[0], kemId, publicKey: configuration.subarray(3, 35) };
  const expected = hex(vector.encapsulated_request);
  const isOurs = kemId === KEM_X25519;
  // of X-Wing the key encapsulation is given, and all that follows from it is checked
  const enc = isOurs ? undefined : expected.subarray(7, 7 + 1120);
  const exchange = isOurs
    ? sealRequest(key, message, hex(vector.ephemeral_private_key))
    : sealWith(key, message, { enc, sharedSecret: hex(vector.shared_secret) });
  check(name, "the sealed request", exchange.sealed.equals(expected));
  const chunks = openResponse(exchange, hex(vector.encapsulated_response));
  check(name, "the number of frames", chunks.length === vector.num_frames);
  check(name, "the length of a frame", new Set(chunks.map((chunk) => chunk.length)).size === 1);
  const response = decodeResponse(Buffer.concat(chunks));
  check(name, "the status", response.status === vector.status);
  check(name, "the number of informational responses", response.informational.length === vector.num_informational);
  check(name, "the content", response.content.equals(hex(vector.content)));
  check(name, "what is said", JSON.stringify(saidIn(response)) === JSON.stringify(vector.said));
  return name;
}

async function fetchBytes(url, options) {
  const reply = await fetch(url, { ...options, signal: AbortSignal.timeout(30_000) });
  const body = Buffer.from(await reply.arrayBuffer());
  return { status: reply.status, type: reply.headers.get("content-type") ?? "", body };
}

// Seals to the node, and around that to the gateway, and reads the answer back through both.
async function ask({ relay, gateway, node_keys: nodeKeys, authorization, path, content }) {
  const gatewayKeys = (await fetchBytes(`${relay}/.well-known/ohttp-gateway`)).body;
  const fields = [["content-type", "application/json"], ["cloister-framing", "binary-http"]];
  const request = { method: "POST", scheme: "https", authority: "localhost", path, fields, content: Buffer.from(content) };
  const inner = sealRequest(chooseKey(hex(nodeKeys)), encodeRequest(request, bucket));
  const nodeId = createHash("sha256").update(hex(nodeKeys)).digest("hex");
  const { protocol, host, pathname } = new URL(gateway);
  const envelope = {
    method: "POST",
    scheme: protocol.slice(0, -1),
    authority: host,
    path: `${pathname.replace(/\/$/, "")}/nodes/${nodeId}`,
    fields: [["authorization", authorization], ["content-type", REQUEST_TYPE], ["date", new Date().toUTCString()]],
    content: inner.sealed,
  };
  const outer = sealRequest(chooseKey(gatewayKeys), encodeRequest(envelope));
  const reply = await fetchBytes(relay, { method: "POST", headers: { "content-type": REQUEST_TYPE }, body: outer.sealed });
  if (reply.status !== 200 || reply.type !== RESPONSE_TYPE) throw new Error(`the relay answers ${reply.status}: ${reply.body}`);
  const fromGateway = decodeResponse(Buffer.concat(openResponse(outer, reply.body)));
  if (fromGateway.status !== 200) throw new Error(`the gateway answers ${fromGateway.status}: ${fromGateway.content}`);
  const chunks = openResponse(inner, fromGateway.content);
  const response = decodeResponse(Buffer.concat(chunks));
  const frames = chunks.map((chunk) => chunk.length);
  return { status: response.status, fields: response.fields, said: saidIn(response), frames };
}

const [verb, file] = process.argv.slice(2);
if (verb === "open" && file !== undefined) {
  for (const vector of JSON.parse(readFileSync(file)).vectors) console.log(openVector(vector));
} else if (verb === "ask") {
  console.log(JSON.stringify(await ask(JSON.parse(readFileSync(0)))));
} else {
  console.error("usage: node client.mjs open VECTORS | node client.mjs ask < REQUEST");
  process.exit(2);
}
