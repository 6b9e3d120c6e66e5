// The text and bars of the page: each function turns a status into elements.
import { bytes, count, duration, el, measure, plural, ranges, rate } from "./words.js";

const CAUSES = { compute: "computing", network: "network", apply: "updating", barrier: "waiting for others", data: "reading data" };
const GOOD = new Set(["active", "ready", "training", "done"]);
const BAD = new Set(["silent", "failed"]);

/** Shows a state as a word after a mark of its own shape. */
export function state(word, detail = "") {
  const look = GOOD.has(word) ? "good" : BAD.has(word) ? "bad" : "idle";
  return el("span", { class: `state ${look}` }, word + detail);
}

export function head(status, job, live) {
  const mode = status ? status.settings || status.mode : "";
  return [
    el("div", { class: "name" }, el("h1", {}, status ? status.job : job), status ? state(status.phase) : state("starting"), mode ? el("span", { class: "mode" }, mode) : null),
    el("p", { class: `live ${live.ok ? "good" : "bad"}` }, live.text),
  ];
}

export function progress(status) {
  if (!status || !status.total_steps) return el("p", { class: "muted" }, "No steps have been counted yet.");
  const part = Math.min(1, status.global_step / status.total_steps);
  const from = whence(status);
  const words = [from || `Step ${count(status.global_step)} of ${count(status.total_steps)}`];
  if (status.epoch && !from) words.push(`epoch ${status.epoch} of ${status.epochs}`);
  if (status.phase === "training" && status.steps_per_s > 0 && part < 1) {
    const left = (status.total_steps - status.global_step) / status.steps_per_s;
    words.push(`about ${duration(left)} left`);
  }
  return [
    el("div", { class: "progress", role: "progressbar", "aria-label": "Steps done", "aria-valuenow": Math.round(100 * part), "aria-valuemin": 0, "aria-valuemax": 100 }, bar(part, "fill")),
    el("p", { class: "bar" }, el("span", {}, words.join(" · ")), el("strong", {}, `${Math.floor(100 * part)} %`)),
  ];
}

/** The checkpoint that a job continues from, while its step is unknown. */
function whence(status) {
  if (status.phase !== "recovering") return "";
  if (status.restored) return `Restoring from ${status.restored}`;
  const newest = status.newest_checkpoint.split("/").at(-1);
  return newest && !status.global_step ? `Going on from ${newest} or later` : "";
}

export function tiles(status, checkpoint) {
  if (!status) return [];
  const active = status.workers.filter((w) => w.state === "active").length;
  const ready = status.shards.filter((s) => s.state === "ready").length;
  const late = stragglers(status).size;
  const result = status.evaluations.at(-1);
  const names = result ? Object.keys(result.results).sort((a, b) => (a === "loss") - (b === "loss")) : [];
  return [
    tile("Training loss", measure(status.loss), "mean of the last steps"),
    result ? tile(names[0], measure(result.results[names[0]]), `${result.evaluation}, step ${count(result.global_step)}`) : tile("Evaluation", "–", "none yet"),
    tile("Speed", rate(status.examples_per_s), `examples/s · ${rate(status.steps_per_s)} steps/s`),
    status.mode === "sync" ? tile("Staleness", "none", "every round waits for all") : tile("Mean staleness", rate(status.mean_staleness), `updates · shards ${plural(status.version_skew, "version")} apart`),
    tile("Workers", `${active}`, late ? `active · ${plural(late, "straggler")}` : "active · no stragglers", late ? "warn" : ""),
    tile(kinds(status), `${ready} of ${status.shards.length}`, "ready", ready < status.shards.length ? "warn" : ""),
    tile("Last checkpoint", checkpoint.value, checkpoint.detail),
  ];
}

const tile = (name, value, detail, look = "") => el("div", { class: `card tile ${look}` }, el("h3", {}, name), el("p", { class: "figure" }, value), el("p", { class: "muted" }, detail));

/** What there is beside the workers. */
const kinds = (status) => (status.shards.every((s) => !s.slice) ? "Shards" : status.shards.every((s) => s.slice) ? "Slices" : "Shards, slices");

export function histogram(status) {
  const found = status ? ranges(status.staleness_counts) : [];
  const total = found.reduce((sum, [, n]) => sum + n, 0);
  if (!total) return el("p", { class: "empty" }, "No push has been applied yet.");
  const most = Math.max(...found.map(([, n]) => n));
  const rows = found.map(([label, n]) =>
    el("tr", {}, el("th", { scope: "row" }, label), el("td", { class: "bars" }, bar(n / most, "fill")), el("td", { class: "n" }, percent(n / total)), el("td", { class: "n muted" }, count(n))),
  );
  return el("table", { class: "histogram" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "updates behind"), el("th", { scope: "col" }, el("span", { class: "unseen" }, "bar")), el("th", { scope: "col", class: "n" }, "share"), el("th", { scope: "col", class: "n" }, "pushes"))), el("tbody", {}, rows));
}

/** How long a member has been silent, once it has missed two heartbeats. */
function silence(member) {
  if (member.state === "silent") return ` for ${duration(member.silent_s)}`;
  const missed = !["left", "missing"].includes(member.state) && member.silent_s >= 3;
  return missed ? `, silent for ${duration(member.silent_s)}` : "";
}

export function workers(status) {
  if (!status || !status.workers.length) return el("p", { class: "empty" }, "No worker has joined yet. Each one appears here as soon as it has.");
  const late = stragglers(status);
  const fastest = Math.max(1e-9, ...status.workers.map((w) => w.examples_per_s));
  const there = status.workers.filter((w) => w.state !== "left");
  const gone = status.workers.length - there.length;
  const rows = there.map((worker) => {
    const slow = late.get(worker.worker);
    const cut = worker.unreachable || [];
    return el("tr", { class: slow || cut.length ? "slow" : null },
      cell("Worker", [el("strong", {}, worker.worker), cut.length ? el("span", { class: "badge" }, "cut off") : null, slow ? el("span", { class: "badge" }, "straggler") : null, el("small", {}, `${worker.host} · pid ${worker.pid}${worker.device ? ` · ${worker.device}` : ""}`)]),
      cell("State", [state(worker.state, silence(worker)), cut.map((one) => el("small", {}, `cannot reach shard ${one.shard} for ${duration(one.for_s)}`)), waiting(worker)]),
      cell("Examples/s", [el("span", { class: "withbar" }, rate(worker.examples_per_s), bar(worker.examples_per_s / fastest, slow ? "late" : "fill"))], "n"),
      cell("Batches", [count(worker.batches), el("small", {}, `${rate(worker.batches_per_s)} per s`)], "n"),
      cell("Compute time", worker.slowness ? [slow ? el("strong", {}, times(worker.slowness)) : times(worker.slowness), el("small", {}, "of the median")] : "–", "n"),
      cell("Where its time goes", shares(worker.times)),
      cell("Mean staleness", rate(mean(worker.staleness_counts)), "n"),
    );
  });
  return [
    table(["Worker", "State", "Examples/s", "Batches", "Compute time", "Where its time goes", "Mean staleness"], rows, [2, 3, 4, 6]),
    el("p", { class: "key" }, Object.entries(CAUSES).map(([cause, words]) => el("span", { class: `swatch ${cause}` }, words))),
    gone ? el("p", { class: "key" }, `${plural(gone, "worker")} ${gone === 1 ? "has" : "have"} left.`) : null,
    (status.stuck || []).map((line) => el("p", { class: "key warn" }, `Stuck: ${line}`)),
    [...late.values()].map((line) => el("p", { class: "key warn" }, `Straggler: ${line}`)),
  ];
}

export function shards(status) {
  if (!status || !status.shards.length) return el("p", { class: "empty" }, "The coordinator has not read the job yet.");
  const busiest = Math.max(1e-9, ...status.shards.map((s) => s.gradient_nbytes_per_s || 0));
  const rows = status.shards.map((shard) =>
    el("tr", {},
      cell("Shard", [el("strong", {}, `${shard.slice ? "slice" : "shard"} ${shard.shard}`), el("small", {}, [shard.worker, shard.address].filter(Boolean).join(" · "))]),
      cell("State", [state(shard.state, silence(shard)), waiting(shard)]),
      cell("Updates/s", [rate(shard.updates_per_s), el("small", {}, `version ${count(shard.version)}`)], "n"),
      cell("Gradients in", [el("span", { class: "withbar" }, `${bytes(shard.gradient_nbytes_per_s)}/s`, bar(shard.gradient_nbytes_per_s / busiest, "fill")), el("small", {}, `${bytes(shard.gradient_nbytes)} in all`)], "n"),
      cell("Parameters", [bytes(shard.nbytes), shard.table_nbytes ? el("small", {}, `${count(shard.table_rows)} rows of tables, ${bytes(shard.table_nbytes)}`) : ""], "n"),
      cell("Memory", shard.memory_nbytes ? bytes(shard.memory_nbytes) : "–", "n"),
      cell("Updating", [`${rate(shard.apply_s)} s`, el("small", {}, shard.version ? `${rate((1000 * shard.apply_s) / shard.version)} ms each` : "")], "n"),
    ),
  );
  return table(["Shard", "State", "Updates/s", "Gradients in", "Parameters", "Memory", "Updating"], rows, [2, 3, 4, 5, 6]);
}

/** Lateness in words, by the name of the worker. */
export const stragglers = (status) => new Map(status.stragglers.map((line) => [line.split(" ")[0].replace(/[:,]$/, ""), line]));

function table(titles, rows, figures) {
  const heads = titles.map((title, i) => el("th", { scope: "col", class: figures.includes(i) ? "n" : null }, title));
  return el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
}

const waiting = (member) => (member.waiting_for ? el("small", { class: "clamp", title: member.waiting_for }, `waits for ${member.waiting_for}`) : null);

export const cell = (title, content, look = null) => el("td", { "data-title": title, class: look }, el("div", {}, content));

function shares(spent) {
  const total = spent ? Object.keys(CAUSES).reduce((sum, cause) => sum + spent[cause], 0) : 0;
  if (!total) return "–";
  let at = 0;
  const parts = Object.keys(CAUSES).map((cause) => {
    const width = (100 * spent[cause]) / total;
    at += width;
    return el("rect", { class: cause, x: at - width, y: 0, width, height: 10 });
  });
  const most = Object.entries(CAUSES).sort(([a], [b]) => spent[b] - spent[a]).slice(0, 2).filter(([cause]) => spent[cause] / total >= 0.01);
  return [
    el("svg", { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, parts),
    el("small", {}, most.map(([cause, words]) => `${percent(spent[cause] / total)} ${words}`).join(", ")),
  ];
}

function bar(part, look) {
  const width = 100 * Math.min(1, Math.max(0, part || 0));
  return el("svg", { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, el("rect", { class: look, x: 0, y: 0, width, height: 10 }));
}

const percent = (part) => (part > 0 && part < 0.01 ? "< 1 %" : `${Math.round(100 * part)} %`);
const times = (ratio) => `${ratio.toFixed(2)} ×`;

function mean(counts) {
  const total = counts.reduce((a, b) => a + b, 0);
  return total ? counts.reduce((sum, n, s) => sum + s * n, 0) / total : null;
}
