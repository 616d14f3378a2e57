// Binary HTTP, RFC 9292: requests of known length are written, responses of both forms are read.

export function encodeVarint(value) {
  if (value < 64) return Buffer.from([value]);
  const bytes = Buffer.alloc(value < 16384 ? 2 : 4);
  if (bytes.length === 2) bytes.writeUInt16BE(value | 0x4000);
  else bytes.writeUInt32BE((value | 0x80000000) >>> 0);
  return bytes;
}

export class Reader {
  constructor(data) {
    this.data = data;
    this.place = 0;
  }

  get left() {
    return this.data.length - this.place;
  }

  take(length) {
    if (length > this.left) throw new Error("the message is cut off");
    this.place += length;
    return this.data.subarray(this.place - length, this.place);
  }

  varint() {
    const [first] = this.take(1);
    let value = BigInt(first & 0x3f);
    for (const byte of this.take((1 << (first >> 6)) - 1)) value = (value << 8n) | BigInt(byte);
    return Number(value);
  }

  prefixed() {
    return this.take(this.varint());
  }
}

const prefixed = (data) => Buffer.concat([encodeVarint(data.length), data]);

// Section 3.8: zeros behind the message pad it.
export function encodeRequest({ method, scheme, authority, path, fields, content }, paddedTo = () => 0) {
  const control = [method, scheme, authority, path].map((part) => prefixed(Buffer.from(part)));
  const lines = fields.flat().map((part) => prefixed(Buffer.from(part)));
  const body = content.length ? [prefixed(content)] : [];
  const message = Buffer.concat([Buffer.from([0]), ...control, prefixed(Buffer.concat(lines)), ...body]);
  return Buffer.concat([message, Buffer.alloc(Math.max(0, paddedTo(message.length) - message.length))]);
}

function readKnownFields(reader) {
  if (reader.left === 0) return [];
  const lines = new Reader(reader.prefixed());
  const fields = [];
  while (lines.left > 0) fields.push([lines.prefixed().toString("latin1"), lines.prefixed().toString("latin1")]);
  return fields;
}

function readFields(reader) {
  const fields = [];
  for (let length = reader.varint(); length > 0; length = reader.varint()) {
    fields.push([reader.take(length).toString("latin1"), reader.prefixed().toString("latin1")]);
  }
  return fields;
}

function readContent(reader) {
  const chunks = [];
  for (let length = reader.varint(); length > 0; length = reader.varint()) chunks.push(reader.take(length));
  return Buffer.concat(chunks);
}

export function decodeResponse(message) {
  const reader = new Reader(message);
  const form = reader.varint();
  if (form !== 1 && form !== 3) throw new Error("the message is no Binary HTTP response");
  const isKnown = form === 1;
  const informational = [];
  let status = reader.varint();
  let fields = isKnown ? readKnownFields(reader) : readFields(reader);
  while (status < 200) {
    informational.push(status);
    status = reader.varint();
    fields = isKnown ? readKnownFields(reader) : readFields(reader);
  }
  const content = isKnown ? (reader.left ? reader.prefixed() : Buffer.alloc(0)) : readContent(reader);
  if (isKnown) readKnownFields(reader);
  else readFields(reader);
  if (reader.take(reader.left).some((byte) => byte !== 0)) throw new Error("what follows the message is no padding");
  return { status, fields, informational, content };
}
