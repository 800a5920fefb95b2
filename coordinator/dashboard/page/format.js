// Numbers, sizes and times as text.

export function number(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 1 : 2)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)}k`;
  if (Number.isInteger(value) || size >= 100) return Math.round(value).toLocaleString("en");
  return size >= 1 ? value.toFixed(1) : value.toFixed(2);
}

// Formats steps per second, with one decimal below 100.
export function rate(value) {
  return value < 100 ? value.toFixed(1) : number(value);
}

// Formats a loss, or another reported value, with four significant digits.
export function value(reported) {
  const size = Math.abs(reported);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return reported.toExponential(2);
  return String(Number(reported.toPrecision(4)));
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count >= 100 || unit === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function percent(share) {
  return `${(100 * share).toFixed(0)} %`;
}

export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
