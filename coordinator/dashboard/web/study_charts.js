// The charts of a study, as SVG: values over trials, and settings beside values.
import { el, measure } from "./words.js";

const MARGIN = { left: 56, right: 16, top: 14, bottom: 24 };
const HEIGHT = 220;
const TICKS = 4;

/** The best value up to each trial that is complete: [[number, value], ...]. */
export function bestSoFar(trials, direction) {
  const better = direction === "max" ? (a, b) => a > b : (a, b) => a < b;
  const found = [];
  for (const trial of trials) {
    if (trial.phase !== "complete" || trial.value === null) continue;
    const last = found.at(-1)?.[1];
    found.push([trial.number, last === undefined || better(trial.value, last) ? trial.value : last]);
  }
  return found;
}

/** Where a value stands on the axis of a setting, from 0 to 1; null off the axis. */
export function place(axis, value) {
  if (axis.values) {
    const index = axis.values.indexOf(value);
    if (index < 0) return null;
    return axis.values.length === 1 ? 0.5 : index / (axis.values.length - 1);
  }
  if (typeof value !== "number") return null;
  const at = axis.log ? Math.log : (x) => x;
  return axis.high === axis.low ? 0.5 : (at(value) - at(axis.low)) / (at(axis.high) - at(axis.low));
}

const extent = (values) => [Math.min(...values), Math.max(...values)];

const svg = (width, height, label, ...children) =>
  el("svg", { class: "drawn", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);

/** Values over trials, with the best so far as a line. */
export function valuesChart(study, width) {
  const shown = study.trials.filter((trial) => trial.value !== null);
  if (!shown.length) return el("p", { class: "empty" }, "The first evaluation is not there yet.");
  const [low, high] = extent(shown.map((trial) => trial.value));
  const span = high - low || Math.abs(high) || 1;
  const last = Math.max(study.limit - 1, ...study.trials.map((trial) => trial.number), 1);
  const x = (number) => MARGIN.left + (number / last) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => HEIGHT - MARGIN.bottom - ((value - low) / span) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const lines = [...Array(TICKS + 1).keys()].map((i) => {
    const value = low + (span * i) / TICKS;
    return [
      el("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      el("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, measure(value)),
    ];
  });
  const numbers = [0, last].map((number) => el("text", { x: x(number), y: HEIGHT - 6, "text-anchor": "middle" }, `${number}`));
  const steps = bestSoFar(study.trials, study.direction);
  const path = steps.map(([number, value], i) => (i ? `H${x(number)}V${y(value)}` : `M${x(number)} ${y(value)}`)).join("");
  const dots = shown.map((trial) =>
    el("circle", { class: trial.number === study.best ? "best" : trial.phase, cx: x(trial.number), cy: y(trial.value), r: 4 }, el("title", {}, `trial ${trial.number}: ${measure(trial.value)}, ${trial.phase}`)),
  );
  return svg(width, HEIGHT, `${study.metric} of each trial`, lines, numbers, path ? el("path", { class: "sofar", d: path }) : null, dots);
}

/** A line for each trial with a value, through its settings; the last axis has the values. */
export function parallelChart(study, width) {
  const shown = study.trials.filter((trial) => trial.value !== null && trial.phase !== "failed");
  if (!shown.length) return el("p", { class: "empty" }, "The first evaluation is not there yet.");
  const [low, high] = extent(shown.map((trial) => trial.value));
  const axes = [...study.axes, { key: study.metric, low, high, log: false, result: true }];
  const top = MARGIN.top + 18;
  const left = 70;
  const x = (i) => left + (i / Math.max(1, axes.length - 1)) * (width - 2 * left);
  const y = (part) => HEIGHT - MARGIN.bottom - part * (HEIGHT - top - MARGIN.bottom);
  const good = (value) => {
    const part = high === low ? 1 : (value - low) / (high - low);
    return study.direction === "max" ? part : 1 - part;
  };
  const drawn = axes.map((axis, i) => [
    el("line", { class: "grid", x1: x(i), x2: x(i), y1: y(0), y2: y(1) }),
    el("text", { x: x(i), y: MARGIN.top, "text-anchor": "middle" }, axis.key),
    marks(axis).map(([part, text]) => el("text", { x: x(i) - 6, y: y(part) + 4, "text-anchor": "end" }, text)),
  ]);
  const sorted = [...shown].sort((a, b) => good(a.value) - good(b.value));
  const lines = sorted.map((trial) => {
    const places = axes.map((axis) => place(axis, axis.result ? trial.value : trial.point[axis.key]));
    const d = places.map((part, i) => (part === null ? "" : `${i && places[i - 1] !== null ? "L" : "M"}${x(i)} ${y(part)}`)).join("");
    const words = axes.slice(0, -1).map((axis) => `${axis.key}=${text(trial.point[axis.key])}`);
    return el("path", { class: trial.number === study.best ? "trial best" : "trial", d, "stroke-opacity": (0.1 + 0.9 * good(trial.value) ** 2).toFixed(2) }, el("title", {}, `trial ${trial.number}: ${measure(trial.value)}; ${words.join(", ")}`));
  });
  return svg(width, HEIGHT, "Settings and value of each trial", drawn, lines);
}

function marks(axis) {
  if (axis.values) return axis.values.map((value) => [place(axis, value), text(value)]);
  return axis.high === axis.low ? [[0.5, text(axis.low)]] : [[0, text(axis.low)], [1, text(axis.high)]];
}

/** A value of a setting, numbers with four digits. */
export function text(value) {
  return typeof value === "number" && !Number.isInteger(value) ? `${Number(value.toPrecision(4))}` : `${value}`;
}
