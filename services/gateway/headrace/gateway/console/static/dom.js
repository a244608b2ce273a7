// Elements, and how numbers are written. Text is always set as text: what a model or a client wrote is never markup.

export const byId = (id) => document.getElementById(id);

/** h("div", {class: "x", onclick: f}, "text", child) */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

/** A coloured bar that is `share` (0 to 1) full. */
export function bar(share) {
  const fill = h("i");
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h("div", { class: "bar" }, fill);
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

export function bytes(count) {
  if (count == null) return "–";
  if (count < 1e6) return `${(count / 1e3).toFixed(0)} kB`;
  return count < 1e9 ? `${(count / 1e6).toFixed(1)} MB` : `${(count / 1e9).toFixed(2)} GB`;
}

/** Bytes a second. */
export function rate(value) {
  if (value == null) return "–";
  return value < 1e8 ? `${(value / 1e6).toFixed(1)} MB/s` : `${(value / 1e9).toFixed(2)} GB/s`;
}

export function number(value, digits = 0) {
  return value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function percentile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];
}
