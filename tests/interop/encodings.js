// Tensors as they travel, {encoding, bytes}; see Encoding in protos/psrpc/v1/types.proto. Numbers
// on the wire are little-endian, as are typed arrays wherever Node runs.
"use strict";

const TYPES = { float32: Float32Array, float64: Float64Array };

/** A typed array, as it is. */
function plain(array) {
  return { encoding: "ENCODING_PLAIN", bytes: bytesOf(array) };
}

/** The upper half of every float32, rounded to nearest even. Infinities and NaN not thought of. */
function bfloat16(array) {
  const bits = new Uint32Array(array.buffer, array.byteOffset, array.length);
  const halves = Uint16Array.from(bits, (b) => (b + 0x7fff + ((b >>> 16) & 1)) >>> 16);
  return { encoding: "ENCODING_BFLOAT16", bytes: bytesOf(halves) };
}

/** `levels`, an Int8Array of n, and `scales`, a Float32Array, one for every 1024 of them. */
function int8(levels, scales) {
  const bytes = Buffer.concat([bytesOf(scales), bytesOf(levels)]);
  return { encoding: "ENCODING_INT8", bytes };
}

/** `indices`, a Uint32Array of k rising ones, and the elements there, a Float32Array. */
function topk(indices, elements) {
  const bytes = Buffer.concat([bytesOf(indices), bytesOf(elements)]);
  return { encoding: "ENCODING_TOPK", bytes };
}

/** Values that a shard sent, as a typed array of the arena's dtype. */
function decoded({ arena, encoding, bytes }) {
  // A copy, since a typed array has to begin at a multiple of its element.
  const whole = new Uint8Array(bytes).buffer;
  if (encoding === "ENCODING_PLAIN") return new TYPES[arena.dtype](whole);
  if (encoding === "ENCODING_BFLOAT16") {
    const bits = Uint32Array.from(new Uint16Array(whole), (half) => half << 16);
    return new Float32Array(bits.buffer);
  }
  throw new Error(`arena ${arena.name} came as ${encoding}, which was not asked for`);
}

function bytesOf(array) {
  return Buffer.from(array.buffer, array.byteOffset, array.byteLength);
}

module.exports = { bfloat16, bytesOf, decoded, int8, plain, topk };
