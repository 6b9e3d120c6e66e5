// What test_grpc_js.py lets a stock client do: node scenarios.js NAME, with the place of the shard
// as JSON on standard input. Prints what came back as JSON, tensors as base64 of their bytes.
"use strict";

const grpc = require("@grpc/grpc-js");

const { bfloat16, bytesOf, int8, plain, topk } = require("./encodings.js");
const { MAX_CHUNK_BYTES, Shard, extentsOf, streamOf } = require("./shard.js");

const NEWEST = { newest: true, encoding: "ENCODING_PLAIN" };
const HALVES = { newest: true, encoding: "ENCODING_BFLOAT16" };
const ARRAYS = { float32: Float32Array, float64: Float64Array };

/** Arena name -> tensor whose element i is f(i); `encode` is for what may be encoded at all. */
function tensorsOf(shard, f, encode = plain) {
  const entries = shard.arenas.map(({ name, dtype, role, length }) => {
    const array = ARRAYS[dtype].from({ length }, (_, i) => f(i));
    const trainable = dtype === "float32" && role === "trainable";
    return [name, trainable ? encode(array) : plain(array)];
  });
  return Object.fromEntries(entries);
}

// The same formulas are in test_grpc_js.py. A third has no exact representation.
const values = (shard) => tensorsOf(shard, (i) => (i % 1009) / 3);
const gradients = (shard, step, encode) =>
  tensorsOf(shard, (i) => ((i * 7 + step) % 23) / 3 - 4, encode);
const batch = (step) => ({ epoch: 0, first: step * 4, count: 4 });

/** One call for each thing. */
async function calls(shard) {
  const out = [];
  out.push(await shard.getStatus());
  out.push(await shard.initialize(values(shard)));
  out.push(await shard.initialize(gradients(shard, 9)));
  out.push(await shard.pull(NEWEST));
  out.push(await shard.push(batch(0), 0, gradients(shard, 0)));
  out.push(await shard.push(batch(1), 0, gradients(shard, 1)));
  out.push(await shard.push(batch(1), 0, gradients(shard, 9)));
  out.push(await shard.push(batch(2), 2, null));
  out.push(await shard.pull(NEWEST));
  out.push(await shard.getStatus());
  return out;
}

/** Many exchanges in one call. */
async function exchanges(shard) {
  await shard.initialize(values(shard));
  const talk = shard.converse();
  const out = [];
  for (const step of [0, 1]) {
    const push = { batch: batch(step), baseVersion: step, tensors: gradients(shard, step) };
    out.push(await talk.exchange(push, NEWEST));
  }
  const third = { batch: batch(2), baseVersion: 2, tensors: gradients(shard, 2) };
  out.push(await talk.exchange(third, null));
  out.push(await talk.exchange(null, NEWEST));
  out.push(await talk.exchange({ batch: batch(3), baseVersion: 3, tensors: null }, NEWEST));
  await talk.end();
  return out;
}

/** Every encoding but float16, which JavaScript has not: gradients one by one, then both ways. */
async function encodings(shard) {
  await shard.initialize(values(shard));
  const out = [];
  const pushed = async (step, encode) => {
    const tensors = gradients(shard, step, encode);
    out.push(await shard.push(batch(step), step, tensors), await shard.pull(NEWEST));
  };
  await pushed(0, bfloat16);
  await pushed(1, ({ length }) => {
    const levels = Int8Array.from({ length }, (_, i) => (i % 255) - 127);
    return int8(levels, Float32Array.from({ length: Math.ceil(length / 1024) }, (_, b) => b + 0.5));
  });
  await pushed(2, ({ length }) => {
    const indices = Uint32Array.from({ length: Math.ceil(length / 100) }, (_, j) => j * 100);
    return topk(indices, Float32Array.from(indices, (i) => i + 0.25));
  });
  const talk = shard.converse();
  const push = { batch: batch(3), baseVersion: 3, tensors: gradients(shard, 3, bfloat16) };
  out.push(await talk.exchange(push, HALVES), await shard.pull(HALVES));
  await talk.end();
  return out;
}

/** Sync: two micro-batches are staged, then their round is decided and the next one pulled. */
async function round(shard, { decision, signature }) {
  await shard.initialize(values(shard));
  const out = [];
  for (const step of [0, 1]) out.push(await shard.push(batch(step), 0, gradients(shard, step)));
  const signed = { decision: Buffer.from(decision, "base64"), signature: Buffer.from(signature, "base64") };
  out.push(await shard.pull({ round: 1, decision: signed, encoding: "ENCODING_PLAIN" }));
  return out;
}

/** What a shard must refuse, each without a trace. */
async function refusals(shard) {
  const out = {};
  const expect = async (name, attempt) => {
    try {
      out[name] = { accepted: await attempt() };
    } catch (error) {
      if (error.code === undefined) throw error;
      const [psrpcError] = error.metadata.get("psrpc-error");
      out[name] = { code: grpc.status[error.code], psrpcError, details: error.details };
    }
  };
  const { arenas, fence } = shard;
  await expect("not initialized", () => shard.pull(NEWEST));
  await shard.initialize(values(shard));

  const tensors = gradients(shard, 0);
  const good = () => [...streamOf(shard.pushHeader(batch(0), 0, tensors), arenas, tensors)];
  const push = (messages) => shard.upload("pushGradients", messages);
  const changed = (change) => {
    const [{ header }, ...chunks] = good();
    return [{ header: { ...header, ...change } }, ...chunks];
  };
  const extents = extentsOf(arenas, tensors);
  const firstExtent = (change) => ({ extents: [{ ...extents[0], ...change }, ...extents.slice(1)] });
  const otherFence = (change) => changed({ fence: { ...fence, ...change } });
  const firstChunk = (change) => {
    const [header, { chunk }, ...chunks] = good();
    return [header, { chunk: { ...chunk, ...change } }, ...chunks];
  };

  const pushes = {
    "other generation": otherFence({ generation: "2" }),
    "other incarnation": otherFence({ shardIncarnation: "12345678901234567890" }),
    "other plan": otherFence({ planHash: Buffer.alloc(32) }),
    "no encoding": changed(firstExtent({ encoding: "ENCODING_UNSPECIFIED" })),
    "unknown encoding": changed(firstExtent({ encoding: 99 })),
    "unknown arena": changed(firstExtent({ arena: 7 })),
    "too long for the plan": changed(firstExtent({ nbytes: "18446744073709551615" })),
    "arena missing": changed({ extents: extents.slice(1) }),
    "other count": changed({ examples: 5 }),
    "version to come": changed({ baseVersion: 1 }),
    "no header": good().slice(1),
    "nothing at all": [],
    "cut short": good().slice(0, -1),
    "one chunk too many": [...good(), { chunk: { arena: 0, data: Buffer.alloc(4) } }],
    "two headers": [...good().slice(0, 1), ...good()],
    "gap": firstChunk({ offset: 4 }),
    "out of order": [good()[0], ...good().slice(1).reverse()],
    "chunk above 2 MiB": firstChunk({ data: bytesOf(new Uint8Array(MAX_CHUNK_BYTES + 4)) }),
    "torn element": firstChunk({ data: Buffer.alloc(6) }),
  };
  for (const [name, messages] of Object.entries(pushes)) await expect(name, () => push(messages));

  const raw = (...messages) => {
    const call = "/psrpc.v1.ParameterServer/PushGradients";
    const same = (bytes) => bytes;
    return new Promise((resolve, reject) => {
      const stream = shard.stub.makeClientStreamRequest(call, same, same, (error, answer) =>
        error ? reject(error) : resolve(answer),
      );
      for (const message of messages) stream.write(message);
      stream.end();
    });
  };
  await expect("garbage", () => raw(Buffer.from("not protobuf")));
  await expect("header of garbage", () => raw(Buffer.from([0x0a, 3, 0xff, 0xff, 0xff])));
  await expect("message above 8 MiB", () => raw(Buffer.alloc((8 << 20) + 1)));

  const exchange = async (...messages) => {
    const talk = shard.converse();
    for (const message of messages) talk.call.write(message);
    talk.call.end();
    return talk.next();
  };
  const [{ header }, ...chunks] = good();
  const pushing = { header: { push: header } };
  const pulling = { fence, ...NEWEST };
  await expect("asks for nothing", () => exchange({ header: {} }));
  await expect("pull of no source", () => exchange({ header: { pull: { fence } } }));
  await expect("pull without encoding", () =>
    exchange({ header: { pull: { fence, newest: true } } }),
  );
  await expect("pull as int8", () =>
    exchange({ header: { pull: { ...pulling, encoding: "ENCODING_INT8" } } }),
  );
  await expect("no segment", () =>
    exchange({ header: { push: header, pushAt: arenas.map(() => 0) } }),
  );
  await expect("exchange cut short", () => exchange(pushing, ...chunks.slice(0, -1)));
  await expect("next exchange too early", () => exchange(pushing, { header: { pull: pulling } }));
  await expect("cancelled in the middle", async () => {
    const talk = shard.converse();
    await talk.exchange(null, NEWEST);
    for (const message of [pushing, ...chunks.slice(0, -1)]) {
      await new Promise((written) => talk.call.write(message, written));
    }
    talk.call.cancel();
    return talk.next();
  });
  await expect("values", () => shard.pull(NEWEST));
  await expect("sound push", () => push(good()));
  await expect("values after it", () => shard.pull(NEWEST));
  return out;
}

/** JSON with tensors as base64. */
function printable(key, value) {
  return ArrayBuffer.isView(value) ? bytesOf(value).toString("base64") : value;
}

async function main() {
  const chunks = [];
  for await (const chunk of process.stdin) chunks.push(chunk);
  const { address, plan, place, lease } = JSON.parse(Buffer.concat(chunks));
  const scenario = { calls, exchanges, encodings, round, refusals }[process.argv[2]];
  const shard = new Shard(address, plan, place, lease);
  try {
    process.stdout.write(JSON.stringify(await scenario(shard, lease.decided), printable));
  } finally {
    shard.close();
  }
}

main();
