// A client of one shard with stock gRPC for Node and the .proto files; see docs/other-clients.md.
"use strict";

const { createHash } = require("node:crypto");
const path = require("node:path");
const { Readable } = require("node:stream");
const grpc = require("@grpc/grpc-js");
const { loadSync } = require("@grpc/proto-loader");

const { decoded } = require("./encodings.js");

const PROTOS = path.join(__dirname, "..", "..", "protos");
const MAX_CHUNK_BYTES = 2 << 20;

// Numbers of 64 bits as strings, since those of JavaScript hold 53 and an incarnation is random.
const { psrpc } = grpc.loadPackageDefinition(
  loadSync("psrpc/v1/parameter_server.proto", {
    includeDirs: [PROTOS],
    longs: String,
    enums: String,
    defaults: true,
  }),
);
const { ParameterServer } = psrpc.v1;

/** The parts of the arenas that live on `shard`, by a plan as the coordinator sends it. */
function arenasOf(plan, shard) {
  return JSON.parse(plan).arenas.map(({ name, dtype, role, cuts }, index) => ({
    index,
    name,
    dtype,
    role,
    length: cuts[shard + 1] - cuts[shard],
  }));
}

/** The messages of a stream: the header, then every arena in chunks. */
function* streamOf(header, arenas, tensors) {
  yield { header };
  for (const { index, name } of arenas) {
    const { bytes } = tensors[name];
    for (let offset = 0; offset < bytes.length; offset += MAX_CHUNK_BYTES) {
      const data = bytes.subarray(offset, offset + MAX_CHUNK_BYTES);
      yield { chunk: { arena: index, offset, data } };
    }
  }
}

/** What streamOf's header announces: how many bytes of each arena come, in which encoding. */
function extentsOf(arenas, tensors) {
  return arenas.map(({ index, name }) => ({
    arena: index,
    nbytes: tensors[name].bytes.length,
    encoding: tensors[name].encoding,
  }));
}

/** Collects the announced bytes of every arena from chunks, in the one order they may have. */
class Assembly {
  constructor(arenas, extents) {
    this.parts = extents.map(({ arena, nbytes, encoding }) => ({
      arena: arenas[arena],
      encoding,
      bytes: Buffer.alloc(Number(nbytes)),
    }));
    this.at = 0;
    this.offset = 0;
    this.skipFull();
  }

  get complete() {
    return this.at === this.parts.length;
  }

  accept({ arena, offset, data }) {
    const part = this.parts[this.at];
    if (part?.arena.index !== arena || this.offset !== Number(offset)) {
      throw new Error(`unexpected chunk: arena ${arena}, offset ${offset}`);
    }
    if (this.offset + data.length > part.bytes.length) throw new Error("a chunk is too long");
    data.copy(part.bytes, this.offset);
    this.offset += data.length;
    this.skipFull();
  }

  /** Arena name -> typed array. */
  values() {
    if (!this.complete) throw new Error("the stream ended too soon");
    const entries = this.parts.map((part) => [part.arena.name, decoded(part)]);
    return Object.fromEntries(entries);
  }

  skipFull() {
    while (!this.complete && this.offset === this.parts[this.at].bytes.length) {
      this.at += 1;
      this.offset = 0;
    }
  }
}

class Shard {
  /**
   * @param {string} address HOST:PORT.
   * @param {string} plan JSON, byte for byte as the coordinator sent it.
   * @param {{shard: number, incarnation: string, generation: string, policy: string}} place
   * @param {{session: string, initialize: string, grants: Object<string, string>}} lease the
   *   worker's session, its grant to initialize the shard, and by a batch's first position the grant
   *   of attempt 1, all in base64.
   */
  constructor(address, plan, place, lease) {
    this.arenas = arenasOf(plan, place.shard);
    this.fence = {
      generation: place.generation,
      policy: place.policy,
      planHash: createHash("sha256").update(plan).digest(),
      shardIncarnation: place.incarnation,
      session: Buffer.from(lease.session, "base64"),
    };
    this.initializeGrant = Buffer.from(lease.initialize, "base64");
    this.grants = lease.grants;
    this.stub = new ParameterServer(address, grpc.credentials.createInsecure(), {
      "grpc.enable_http_proxy": 0,
    });
  }

  close() {
    this.stub.close();
  }

  getStatus() {
    return new Promise((resolve, reject) => {
      const answer = (error, response) => (error ? reject(error) : resolve(response));
      this.stub.getStatus({}, { deadline: soon() }, answer);
    });
  }

  /** Sets all values; `tensors` is arena name -> {encoding, bytes}, see encodings.js. */
  initialize(tensors) {
    const extents = extentsOf(this.arenas, tensors);
    const header = { fence: this.fence, extents, grant: this.initializeGrant };
    return this.upload("initialize", streamOf(header, this.arenas, tensors));
  }

  /** `batch` is {epoch, first, count}; `tensors` is null for a gradient that was not finite. */
  pushHeader(batch, baseVersion, tensors) {
    return {
      fence: this.fence,
      batch,
      attempt: 1,
      grant: Buffer.from(this.grants[batch.first], "base64"),
      baseVersion,
      examples: batch.count,
      skipped: tensors === null,
      extents: tensors === null ? [] : extentsOf(this.arenas, tensors),
    };
  }

  async push(batch, baseVersion, tensors) {
    const header = this.pushHeader(batch, baseVersion, tensors);
    const messages = streamOf(header, tensors === null ? [] : this.arenas, tensors);
    return (await this.upload("pushGradients", messages)).result;
  }

  /** `pull` is {newest: true, encoding}, or has {round} or {snapshot} in place of newest. */
  async pull(pull) {
    const request = { fence: this.fence, ...pull };
    let header, assembly;
    for await (const message of this.stub.pull(request, { deadline: soon() })) {
      if (message.header) {
        header = message.header;
        assembly = new Assembly(this.arenas, header.extents);
      }
      if (message.chunk) assembly.accept(message.chunk);
    }
    return { ...header, values: assembly.values() };
  }

  /** A conversation of any number of exchanges. */
  converse() {
    return new Conversation(this);
  }

  /** Sends a stream for one answer. */
  upload(method, messages) {
    return new Promise((resolve, reject) => {
      const call = this.stub[method]({ deadline: soon() }, (error, response) =>
        error ? reject(error) : resolve(response),
      );
      // pipe waits where the connection is slower than we are.
      Readable.from(messages).pipe(call);
    });
  }
}

class Conversation {
  constructor(shard) {
    this.shard = shard;
    this.call = shard.stub.exchange({ deadline: soon() });
    this.answers = this.call[Symbol.asyncIterator]();
  }

  /**
   * One exchange: a push, a pull, or both.
   * @param {?object} push {batch, baseVersion, tensors}
   * @param {?object} pull {newest: true, encoding}
   */
  async exchange(push, pull) {
    const { shard } = this;
    const header = { patienceMs: 10_000 };
    const tensors = push?.tensors ?? null;
    if (push) header.push = shard.pushHeader(push.batch, push.baseVersion, tensors);
    // Where a push comes with it, the pull has no fence of its own.
    if (pull) header.pull = push ? pull : { fence: shard.fence, ...pull };
    const messages = streamOf(header, tensors === null ? [] : shard.arenas, tensors);
    Readable.from(messages).pipe(this.call, { end: false });
    const first = await this.next();
    const assembly = new Assembly(shard.arenas, first.header.pull?.extents ?? []);
    if (first.chunk) assembly.accept(first.chunk);
    while (!assembly.complete) assembly.accept((await this.next()).chunk);
    return { ...first.header, values: assembly.values() };
  }

  /** Ends the call and waits until the shard has ended it, too. */
  async end() {
    this.call.end();
    const { done } = await this.answers.next();
    if (!done) throw new Error("the shard said more than was asked for");
  }

  async next() {
    const { done, value } = await this.answers.next();
    if (done) throw new Error("the shard has ended the conversation");
    return value;
  }
}

/** A deadline; a call without one may wait for ever. */
function soon() {
  return Date.now() + 60_000;
}

module.exports = { MAX_CHUNK_BYTES, Shard, extentsOf, streamOf };
