// Fetches a study once a second, and shows it.
import { parallelChart, text, valuesChart } from "./study_charts.js";
import { cell, state } from "./tables.js";
import { count, duration, el, measure, show } from "./words.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 10000;
const PATIENCE_MS = 5000;
const LEAST_WIDTH = 320;

const at = (id) => document.getElementById(id);
const seen = { study: null, away: false };

async function turn() {
  let pause = document.hidden ? HIDDEN_MS : EVERY_MS;
  try {
    const answer = await fetch("/study.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(`/study.json answered ${answer.status}`);
    Object.assign(seen, { study: await answer.json(), away: false });
  } catch {
    seen.away = true;
    pause = Math.max(pause, 2 * EVERY_MS);
  }
  try {
    draw();
  } finally {
    setTimeout(turn, pause);
  }
}

function draw() {
  const { study, away } = seen;
  const live = away ? (study?.ended ? "The study has ended" : "Not connected") : "Live";
  document.title = study ? `${study.name}: ${study.headline}` : "Study";
  show(at("head"), el("div", { class: "name" }, el("h1", {}, study?.name ?? "Study"), state(study?.ended ? "done" : "training")), el("p", { class: `live ${away ? "bad" : "good"}` }, live));
  show(at("banners"), ...banners(study, away));
  if (!study) return;
  show(at("progress"), el("p", {}, study.headline));
  show(at("values-title"), `${study.metric} by trial`, el("span", { class: "unit" }, study.direction === "max" ? " more is better" : " less is better"));
  show(at("values"), valuesChart(study, width("values")));
  show(at("importance"), ...importance(study));
  show(at("parallel"), parallelChart(study, width("parallel")));
  show(at("trials"), trials(study));
  show(at("foot"), el("p", { class: "muted" }, "Importance by PED-ANOVA: what decides whether a trial is among the best tenth. In the chart of settings, better trials are darker."));
}

const width = (id) => Math.max(LEAST_WIDTH, Math.floor(at(id).clientWidth) - 28);

function banners(study, away) {
  const banner = (kind, title, words) => el("div", { class: `banner ${kind}` }, el("strong", {}, title), el("span", {}, words));
  if (study?.ended) return [banner("note", "The study has ended:", study.ended)];
  if (away) return [banner("bad", "The study does not answer.", "This page looks again every two seconds. If the command was ended, the same command goes on with the study.")];
  return [];
}

function importance(study) {
  if (!study.importance.length) return [el("p", { class: "empty" }, `It needs ${count(study.importance_trials)} complete trials, and different values among them.`)];
  return study.importance.map(([key, share]) =>
    el("div", { class: "share" }, el("span", {}, key), el("svg", { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": true }, el("rect", { class: "fill", width: 100 * share, height: 8 })), el("span", { class: "n" }, `${Math.round(100 * share)} %`)),
  );
}

function trials(study) {
  const head = ["trial", "state", study.metric, "epoch", "time", ...study.axes.map((axis) => axis.key), "why"];
  const rows = [...study.trials].reverse().map((trial) =>
    el("tr", { class: trial.number === study.best ? "best" : null },
      cell("trial", trial.dashboard ? el("a", { href: trial.dashboard, target: "_blank", rel: "noopener" }, `${trial.number}`) : `${trial.number}`),
      cell("state", state(...shown(trial, study))),
      cell(study.metric, measure(trial.value), "n"),
      cell("epoch", trial.epochs ? `${trial.epoch} of ${trial.epochs}` : trial.epoch ? `${trial.epoch}` : "–", "n"),
      cell("time", trial.seconds === null ? "–" : duration(trial.seconds), "n"),
      study.axes.map((axis) => cell(axis.key, axis.key in trial.point ? text(trial.point[axis.key]) : "–", "n")),
      cell("why", trial.reason),
    ),
  );
  if (!rows.length) return el("p", { class: "empty" }, "No trial has begun yet.");
  return el("table", {}, el("thead", {}, el("tr", {}, head.map((word, i) => el("th", { scope: "col", class: i > 1 && i < head.length - 1 ? "n" : null }, word)))), el("tbody", {}, rows));
}

/** The word for a trial's state, and what follows it. */
function shown(trial, study) {
  if (trial.phase === "running") return ["active", ""];
  if (trial.phase === "complete") return ["done", trial.number === study.best ? ", the best" : ""];
  return [trial.phase, ""];
}

turn();
