// Oblivious HTTP, RFC 9458, in its chunked form (draft-ietf-ohai-chunked-ohttp-08).

import { Reader, encodeVarint } from "./bhttp.mjs";
import { AEAD_AES_128_GCM, KDF_HKDF_SHA256, KEM_X25519, KEY_BYTES, NONCE_BYTES } from "./hpke.mjs";
import { Sequence, encapsulate, expand, extract, schedule, u16 } from "./hpke.mjs";

export const REQUEST_TYPE = "message/ohttp-chunked-req";
export const RESPONSE_TYPE = "message/ohttp-chunked-res";
const REQUEST_LABEL = "message/bhttp chunked request";
const RESPONSE_LABEL = "message/bhttp chunked response";
const MAX_CHUNK_BYTES = 16384;
const FINAL = Buffer.from("final");

// Section 3.1: the key configuration that this client can use; keys of other mechanisms are passed over.
export function chooseKey(keys) {
  for (const list = new Reader(keys); list.left > 0; ) {
    const one = new Reader(list.take(list.take(2).readUInt16BE()));
    const keyId = one.take(1)[0];
    if (one.take(2).readUInt16BE() !== KEM_X25519) continue;
    const publicKey = one.take(32);
    const suites = new Reader(one.take(one.take(2).readUInt16BE()));
    while (suites.left > 0) {
      const [kdf, aead] = [suites.take(2).readUInt16BE(), suites.take(2).readUInt16BE()];
      if (kdf === KDF_HKDF_SHA256 && aead === AEAD_AES_128_GCM) return { keyId, kemId: KEM_X25519, publicKey };
    }
  }
  throw new Error("the key configurations have no key of X25519 with AES-128-GCM");
}

export function sealRequest(key, message, ephemeral) {
  return sealWith(key, message, encapsulate(key.publicKey, ephemeral));
}

export function sealWith({ keyId, kemId }, message, { enc, sharedSecret }) {
  const numbers = Buffer.concat([Buffer.from([keyId]), u16(kemId), u16(KDF_HKDF_SHA256), u16(AEAD_AES_128_GCM)]);
  const info = Buffer.concat([Buffer.from(REQUEST_LABEL), Buffer.from([0]), numbers]);
  const context = schedule(kemId, sharedSecret, info);
  const parts = [numbers, enc];
  let start = 0;
  for (; message.length - start > MAX_CHUNK_BYTES; start += MAX_CHUNK_BYTES) {
    const sealed = context.sequence.seal(message.subarray(start, start + MAX_CHUNK_BYTES));
    parts.push(encodeVarint(sealed.length), sealed);
  }
  parts.push(Buffer.from([0]), context.sequence.seal(message.subarray(start), FINAL));
  return { sealed: Buffer.concat(parts), enc, context };
}

// The plain text of every chunk; an answer that was cut off or changed anywhere throws.
export function openResponse({ enc, context }, sealed) {
  const reader = new Reader(sealed);
  const nonce = reader.take(Math.max(KEY_BYTES, NONCE_BYTES));
  const prk = extract(Buffer.concat([enc, nonce]), context.export(RESPONSE_LABEL, nonce.length));
  const sequence = new Sequence(expand(prk, Buffer.from("key"), KEY_BYTES), expand(prk, Buffer.from("nonce"), NONCE_BYTES));
  const chunks = [];
  for (let length = reader.varint(); length > 0; length = reader.varint()) chunks.push(sequence.open(reader.take(length)));
  chunks.push(sequence.open(reader.take(reader.left), FINAL));
  return chunks;
}
