// Fetches the job's status once a second, and shows it.
import { Chart } from "./charts.js";
import { lanes, list, newest } from "./lanes.js";
import { head, histogram, progress, shards, tiles, workers } from "./tables.js";
import { clock, count, duration, el, measure, plural, rate, show } from "./words.js";

const EVERY_MS = 1000;
const AWAY_MS = 2000;
const HIDDEN_MS = 10000;
const PATIENCE_MS = 5000;
const STILL_S = 8;
const EVENTS_SHOWN = 12;
const METRICS_SHOWN = 6;

const at = (id) => document.getElementById(id);
const seen = { look: null, history: null, away: null, why: "", skew: 0, edition: null, all: false };
const charts = {};
const ofMetrics = new Map();

function makeCharts() {
  const parent = at("charts");
  const empty = "The curve begins with the first step.";
  charts.loss = new Chart(parent, { title: "Training loss", format: measure, empty });
  charts.examples = new Chart(parent, { title: "Speed", unit: "examples/s", format: rate, fromZero: true, empty });
  charts.steps = new Chart(parent, { title: "Speed", unit: "steps/s", format: rate, fromZero: true, empty });
  const below = at("stale");
  charts.staleness = new Chart(below, { title: "Mean staleness", unit: "updates", format: (v) => v.toFixed(2), fromZero: true, sparse: true, empty: "No push has been applied yet." });
  const body = el("div", { id: "staleness" });
  below.append(el("section", { class: "card chart" }, el("h3", {}, "Staleness of all pushes"), body));
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  // `coordinator dashboard` answers with the reason if the coordinator is away.
  if (!answer.ok) throw Object.assign(new Error(`${path} answered ${answer.status}`), { why: await answer.text() });
  const edition = answer.headers.get("x-edition");
  seen.edition ??= edition;
  // A coordinator of another version has taken over, and has another page.
  if (seen.edition !== edition) location.reload();
  return answer.json();
}

async function turn() {
  let pause = document.hidden ? HIDDEN_MS : EVERY_MS;
  try {
    const [look, history] = await Promise.all([ask("/status.json"), ask("/history.json")]);
    Object.assign(seen, { look, history, away: null, why: "", skew: look.now - Date.now() / 1000 });
  } catch (error) {
    seen.away ??= Date.now() / 1000;
    seen.why = error.why ?? "";
    pause = Math.max(pause, AWAY_MS);
  }
  try {
    draw();
  } finally {
    setTimeout(turn, pause);
  }
}

function draw() {
  const { look, history } = seen;
  const status = look?.status ?? null;
  const now = Date.now() / 1000 + seen.skew;
  document.title = status ? `${status.job}: ${seen.away ? "away" : status.phase}` : "Training job";
  show(at("head"), ...head(status, look?.job ?? "Training job", liveness(now)));
  show(at("banners"), ...banners(look, now));
  show(at("progress"), progress(status));
  show(at("tiles"), tiles(status, checkpoint(status, history, now)));
  show(at("workers"), workers(status));
  show(at("shards"), shards(status));
  show(at("staleness"), histogram(status));
  drawCharts(status, history);
  drawTimeline(history?.events ?? [], now);
  show(at("foot"), foot(look, now));
}

const over = (status) => status?.phase === "done" || status?.phase === "failed";

function liveness(now) {
  if (seen.away) return { ok: false, text: over(seen.look?.status) ? "The coordinator has left" : "Not connected" };
  if (!seen.look) return { ok: false, text: "Connecting" };
  return { ok: true, text: `Live · ${clock(now)}` };
}

function banners(look, now) {
  const status = look?.status;
  const found = [];
  const add = (kind, title, text) => found.push(el("div", { class: `banner ${kind}` }, el("strong", {}, title), el("span", {}, text)));
  if (seen.away && over(status)) add("note", `The job is ${status.phase}.`, "Its coordinator has left; this is the last state that it showed.");
  else if (seen.away && !look) add("bad", "The coordinator does not answer.", `This page looks again every two seconds. ${seen.why}`);
  else if (seen.away) add("bad", `Coordinator away since ${clock(seen.away)}.`, `This is the last state that it showed, ${duration(now - look.looked)} ago. The page goes on by itself when it is back. ${seen.why}`);
  else if (look && look.status && now - look.looked > STILL_S) add("bad", "The coordinator stands still.", `It answers, but has done nothing for ${duration(now - look.looked)}.`);
  if (look && !status) add("note", "The coordinator reads the job.", "Figures come as soon as it is described.");
  if (!status) return found;
  if (status.insecure) add("warn", "Insecure.", "This job talks in plaintext, and anyone who reaches its ports can change it. Certificates: coordinator certs init.");
  if (status.phase === "failed") add("bad", "The job has failed.", status.reason);
  else if (status.waiting_for) add("warn", "Waiting", `for ${status.waiting_for}${waited(status)}.`);
  if (status.switching) add("note", "Changing the mode:", status.switching);
  for (const line of status.warnings.slice(-3)) add("warn", "Warning:", line);
  return found;
}

const waited = (status) => (status.waited_s >= 1 ? `, for ${duration(status.waited_s)}` : "");

function checkpoint(status, history, now) {
  if (!status?.newest_checkpoint) return { value: "–", detail: "none yet" };
  const name = status.newest_checkpoint.split("/").at(-1);
  const event = history?.events.findLast((e) => e.kind === "checkpoint");
  const age = status.checkpoint_age_s >= 0 ? status.checkpoint_age_s + (now - seen.look.looked) : event ? now - event.at : null;
  return { value: age === null ? name : duration(age), detail: age === null ? "" : `ago · ${name}` };
}

function drawCharts(status, history) {
  const which = document.querySelector("#range input:checked").value;
  const found = history?.[which] ?? { at: [], step: [], loss: [], examples_per_s: [], steps_per_s: [], staleness: [] };
  const events = history?.events ?? [];
  charts.loss.set(found.at, found.loss, found.step, events);
  charts.examples.set(found.at, found.examples_per_s, found.step, events);
  charts.steps.set(found.at, found.steps_per_s, found.step, events);
  charts.staleness.set(found.at, found.staleness, found.step, events);
  // Rounds have no staleness, unless a policy admits late gradients.
  at("stale").hidden = status?.mode === "sync" && !status.staleness_counts.slice(1).some((n) => n);
  const kinds = new Set(events.map((event) => event.kind));
  const words = [["failure", "a failure"], ["restart", "a restart"], ["mode", "another mode"]].filter(([kind]) => kinds.has(kind));
  show(at("marks"), words.length ? ["Upright lines: ", ...words.map(([kind, text]) => el("span", { class: `dash ${kind}` }, text))] : []);
  drawMetrics(status?.evaluations ?? []);
}

function drawMetrics(evaluations) {
  const sorted = [...evaluations].sort((a, b) => a.global_step - b.global_step);
  // The last epoch and the final state are evaluated at the same step.
  const rows = sorted.filter((row, i) => row.global_step !== sorted[i + 1]?.global_step);
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.results)))].slice(0, METRICS_SHOWN);
  for (const [name, chart] of ofMetrics) {
    if (!names.includes(name)) {
      chart.remove();
      ofMetrics.delete(name);
    }
  }
  for (const name of names) {
    if (!ofMetrics.has(name)) {
      const chart = new Chart(at("charts"), { title: "Evaluation", unit: name, format: measure, byStep: true, empty: "No evaluation yet." });
      charts.loss.figure.after(chart.figure);
      ofMetrics.set(name, chart);
    }
    const mine = rows.filter((row) => typeof row.results[name] === "number");
    ofMetrics.get(name).set(mine.map((row) => row.global_step), mine.map((row) => row.results[name]));
  }
}

function drawTimeline(events, now) {
  const box = at("lanes");
  show(box, lanes(events, Math.max(280, Math.floor(box.clientWidth)), now));
  show(at("events"), list(seen.all ? events : newest(events, EVENTS_SHOWN), now));
  const more = at("more");
  more.hidden = events.length <= EVENTS_SHOWN;
  more.textContent = seen.all ? "Show fewer" : `Show all ${count(events.length)} events`;
  more.setAttribute("aria-expanded", String(seen.all));
}

function foot(look, now) {
  if (!look?.status) return [];
  const { run_id: run, generation, refused, skipped, failed, examples } = look.status;
  const counts = [[refused, "refused push", "refused pushes"], [skipped, "skipped batch", "skipped batches"], [failed, "batch done again", "batches done again"]].filter(([n]) => n).map(([n, one, many]) => plural(n, one, many));
  return el("p", {}, [`Run ${run}`, `generation ${generation}`, `${count(examples)} examples`, ...counts, `coordinator up for ${duration(now - look.started)}`].join(" · "));
}

at("more").addEventListener("click", () => {
  seen.all = !seen.all;
  draw();
});
at("range").addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of [...Object.values(charts), ...ofMetrics.values()]) chart.recolour();
});
makeCharts();
turn();
