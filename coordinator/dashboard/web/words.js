// Readable figures, and elements made of text. Nothing here parses HTML: names of jobs and workers
// and texts of errors stay text.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (n) => whole.format(n);

export const rate = (n) => (n === null || n === undefined ? "–" : Math.abs(n) < 99.95 ? oneDigit.format(n) : whole.format(n));

/** Four significant digits: 0.02431, 1.204, 3.1e-7. */
export function measure(n) {
  if (n === null || n === undefined) return "–";
  const size = Math.abs(n);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return n.toExponential(2);
  return n.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.1 ? 4 : 5);
}

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 999.5 && unit < units.length - 1) {
    n /= 1000;
    unit += 1;
  }
  return `${unit === 0 || n >= 99.95 ? whole.format(n) : oneDigit.format(n)} ${units[unit]}`;
}

/** Seconds as "4 s", "3 min 20 s", "2 h 05 min" or "3 d 4 h". */
export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const timeOfDay = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dayAndTime = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** A moment in the reader's own time; with the day where that is not today. */
export function clock(unix, now = Date.now() / 1000) {
  const moment = new Date(unix * 1000);
  const today = moment.toDateString() === new Date(now * 1000).toDateString();
  return (today ? timeOfDay : dayAndTime).format(moment);
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

const EXACT = 4;
const OPEN_END = 63;

/** Staleness number by number up to 3, above in ranges that double: [["0", 812], ["4–7", 3]]. */
export function ranges(counts) {
  const found = [];
  for (let first = 0; first < counts.length; ) {
    const open = first >= OPEN_END;
    let stop = first < EXACT ? first + 1 : Math.min(2 * first, OPEN_END);
    if (open) stop = counts.length;
    const sum = counts.slice(first, stop).reduce((a, b) => a + b, 0);
    const label = open ? `${first} or more` : stop === first + 1 ? `${first}` : `${first}–${stop - 1}`;
    found.push([label, sum]);
    first = stop;
  }
  while (found.length && !found[found.length - 1][1]) found.pop();
  return found;
}

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "line", "path", "text", "circle", "title", "g"]);

/** An element; strings among the children become text. */
export function el(tag, attributes = {}, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Replaces the children of `parent` by those wanted; touches only differing ones, so that the
 *  selection, the focus and the scroll position stay. */
export function show(parent, ...wanted) {
  const nodes = wanted.flat(Infinity).filter((node) => node !== null && node !== undefined);
  const made = nodes.map((node) => (typeof node === "string" ? document.createTextNode(node) : node));
  made.forEach((node, i) => {
    const old = parent.childNodes[i];
    if (!old) parent.append(node);
    else if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) old.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (old.data !== node.data) old.data = node.data;
    } else {
      for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
      for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      show(old, ...node.childNodes);
    }
  });
  while (parent.childNodes.length > made.length) parent.lastChild.remove();
}
