// HPKE, RFC 9180, base mode: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-128-GCM. Written from the RFC's text.

import { createCipheriv, createDecipheriv, createHmac } from "node:crypto";
import { createPrivateKey, createPublicKey, diffieHellman, generateKeyPairSync } from "node:crypto";

export const KEM_X25519 = 0x0020;
export const KDF_HKDF_SHA256 = 0x0001;
export const AEAD_AES_128_GCM = 0x0001;
export const KEY_BYTES = 16;
export const NONCE_BYTES = 12;
const TAG_BYTES = 16;

const text = (string) => Buffer.from(string, "utf8");
const hmac = (key, data) => createHmac("sha256", key).update(data).digest();

export function u16(number) {
  const bytes = Buffer.alloc(2);
  bytes.writeUInt16BE(number);
  return bytes;
}

// HKDF, RFC 5869.
export const extract = (salt, secret) => hmac(salt.length ? salt : Buffer.alloc(32), secret);

export function expand(key, info, length) {
  let block = Buffer.alloc(0);
  let out = Buffer.alloc(0);
  for (let counter = 1; out.length < length; counter += 1) {
    block = hmac(key, Buffer.concat([block, info, Buffer.from([counter])]));
    out = Buffer.concat([out, block]);
  }
  return out.subarray(0, length);
}

// Section 4: labels bind what is derived to the names of the algorithms.
function labeled(suiteId) {
  const version = text("HPKE-v1");
  return {
    extract: (salt, label, secret) => extract(salt, Buffer.concat([version, suiteId, text(label), secret])),
    expand: (key, label, info, length) =>
      expand(key, Buffer.concat([u16(length), version, suiteId, text(label), info]), length),
  };
}

const jwkOf = (raw) => ({ kty: "OKP", crv: "X25519", x: raw.toString("base64url") });
const publicKeyOf = (raw) => createPublicKey({ key: jwkOf(raw), format: "jwk" });
const rawOf = (publicKey) => Buffer.from(publicKey.export({ format: "jwk" }).x, "base64url");

function pairOf(secret) {
  if (secret === undefined) return generateKeyPairSync("x25519");
  const head = Buffer.from("302e020100300506032b656e04220420", "hex"); // PKCS #8 of X25519, RFC 8410
  const privateKey = createPrivateKey({ key: Buffer.concat([head, secret]), format: "der", type: "pkcs8" });
  return { privateKey, publicKey: createPublicKey(privateKey) };
}

// Section 4.1. `secret` is for test vectors; else an ephemeral key is drawn.
export function encapsulate(recipient, secret) {
  const pair = pairOf(secret);
  const enc = rawOf(pair.publicKey);
  const kdf = labeled(Buffer.concat([text("KEM"), u16(KEM_X25519)]));
  const shared = diffieHellman({ privateKey: pair.privateKey, publicKey: publicKeyOf(recipient) });
  const key = kdf.extract(Buffer.alloc(0), "eae_prk", shared);
  return { enc, sharedSecret: kdf.expand(key, "shared_secret", Buffer.concat([enc, recipient]), 32) };
}

// A cipher that counts its messages, section 5.2.
export class Sequence {
  constructor(key, baseNonce) {
    this.key = key;
    this.baseNonce = baseNonce;
    this.count = 0n;
  }

  nonce() {
    const nonce = Buffer.from(this.baseNonce);
    let count = this.count;
    for (let place = nonce.length - 1; count > 0n; place -= 1, count >>= 8n) nonce[place] ^= Number(count & 255n);
    this.count += 1n;
    return nonce;
  }

  seal(plaintext, aad = Buffer.alloc(0)) {
    const cipher = createCipheriv("aes-128-gcm", this.key, this.nonce());
    cipher.setAAD(aad);
    return Buffer.concat([cipher.update(plaintext), cipher.final(), cipher.getAuthTag()]);
  }

  open(sealed, aad = Buffer.alloc(0)) {
    const cipher = createDecipheriv("aes-128-gcm", this.key, this.nonce());
    cipher.setAAD(aad);
    cipher.setAuthTag(sealed.subarray(sealed.length - TAG_BYTES));
    return Buffer.concat([cipher.update(sealed.subarray(0, sealed.length - TAG_BYTES)), cipher.final()]);
  }
}

// Section 5.1: a context, with the secret from which others are exported.
export function schedule(kemId, sharedSecret, info) {
  const kdf = labeled(Buffer.concat([text("HPKE"), u16(kemId), u16(KDF_HKDF_SHA256), u16(AEAD_AES_128_GCM)]));
  const none = Buffer.alloc(0);
  const hashes = [kdf.extract(none, "psk_id_hash", none), kdf.extract(none, "info_hash", info)];
  const context = Buffer.concat([Buffer.from([0]), ...hashes]);
  const secret = kdf.extract(sharedSecret, "secret", none);
  const exporter = kdf.expand(secret, "exp", context, 32);
  const baseNonce = kdf.expand(secret, "base_nonce", context, NONCE_BYTES);
  return {
    sequence: new Sequence(kdf.expand(secret, "key", context, KEY_BYTES), baseNonce),
    export: (label, length) => kdf.expand(exporter, "sec", text(label), length),
  };
}
