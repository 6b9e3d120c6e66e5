// The timeline of events, as marks on lanes and as a list.
import { clock, count, el } from "./words.js";

const LANES = [
  ["Checkpoints", ["checkpoint"], "square"],
  ["Evaluations", ["evaluation"], "ring"],
  ["Phases, modes", ["phase", "mode"], "bar"],
  ["Restarts", ["restart"], "diamond"],
  ["Failures", ["failure", "warning"], "cross"],
];
const WORDS = { phase: "Phase", mode: "Mode", member: "Member", failure: "Failure", restart: "Restart", evaluation: "Evaluation", checkpoint: "Checkpoint", waiting: "Waiting", warning: "Warning" };
// Routine events of every epoch, or of every start of a coordinator.
const ROUTINE = ["checkpoint", "evaluation", "member", "waiting"];
const LABEL = 104;
const ROW = 24;

export function lanes(events, width, now) {
  if (!events.length) return el("p", { class: "empty" }, "Nothing has happened yet.");
  const first = events[0].at;
  const span = Math.max(10, now - first);
  const inner = width - LABEL - 12;
  const x = (at) => LABEL + ((at - first) / span) * inner;
  const height = LANES.length * ROW + 20;
  const rows = LANES.map(([name, kinds, shape], lane) => {
    const y = lane * ROW + ROW / 2;
    const found = events.filter((event) => kinds.includes(event.kind));
    return el("g", {},
      el("text", { class: "lane", x: 0, y: y + 4 }, name),
      el("line", { class: "rail", x1: LABEL, x2: width - 12, y1: y, y2: y }),
      found.map((event) => el("g", { class: `mark ${event.kind}` }, el("title", {}, `${clock(event.at)} ${event.text}`), mark(shape, x(event.at), y))),
    );
  });
  const ends = [el("text", { class: "lane", x: LABEL, y: height - 4 }, clock(first, now)), el("text", { class: "lane end", x: width - 12, y: height - 4 }, clock(now, now))];
  return el("svg", { class: "lanes", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Marks of what happened over time; the list below says the same in words" }, rows, ends);
}

function mark(shape, x, y) {
  if (shape === "square") return el("rect", { x: x - 4, y: y - 4, width: 8, height: 8, rx: 1.5 });
  if (shape === "ring") return el("circle", { class: "hollow", cx: x, cy: y, r: 4 });
  if (shape === "bar") return el("rect", { x: x - 1.5, y: y - 8, width: 3, height: 16, rx: 1.5 });
  if (shape === "diamond") return el("path", { d: `M${x} ${y - 6}l6 6-6 6-6-6z` });
  return el("path", { class: "hollow thick", d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8` });
}

/** The newest events; at least half are not routine, if there are so many. */
export function newest(events, most) {
  const found = new Set(events.filter((event) => !ROUTINE.includes(event.kind)).slice(-most / 2));
  for (const event of [...events].reverse()) {
    if (found.size < most) found.add(event);
  }
  return events.filter((event) => found.has(event));
}

export function list(events, now) {
  return [...events].reverse().map((event) =>
    el("li", { class: `event ${event.kind}` },
      el("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at, now)),
      el("span", { class: "kind" }, WORDS[event.kind] ?? event.kind),
      el("span", { class: "text" }, event.text),
      el("span", { class: "step" }, event.step && !event.text.includes("step") ? `step ${count(event.step)}` : ""),
    ),
  );
}
