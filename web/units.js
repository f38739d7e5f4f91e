// Formats figures as the sterna commands do.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

// Formats 4294967296 as "4.0 GiB".
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = Math.max(0, count), unit = 0;
  while (value >= (unit ? 1023.95 : 1024) && unit + 1 < BINARY.length) { value /= 1024; unit += 1; }
  return (unit ? value.toFixed(1) : Math.round(value)) + " " + BINARY[unit];
}

export function rate(perSecond) {
  return perSecond === null || perSecond === undefined ? "–" : bytes(perSecond) + "/s";
}

// Formats a network's bits per second, in powers of 1,000.
export function bits(perSecond) {
  let value = perSecond, unit = 0;
  const names = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"];
  while (value >= 1000 && unit + 1 < names.length) { value /= 1000; unit += 1; }
  return +value.toPrecision(3) + " " + names[unit];
}

export function count(number) {
  if (number === null || number === undefined) return "–";
  const digits = number > 0 && number < 9.95 && !Number.isInteger(number) ? 1 : 0;
  return number.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

// Formats a number of events in each second.
export function each(perSecond) {
  return perSecond === null || perSecond === undefined ? "–" : count(perSecond) + "/s";
}

export function latency(micros) {
  if (micros === null || micros === undefined) return "–";
  if (micros < 1000) return Math.round(micros) + " µs";
  if (micros < 1e6) return three(micros / 1000) + " ms";
  return three(micros / 1e6) + " s";
}

export function duration(seconds) {
  if (seconds < 10) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return days + " d " + hours + " h";
  if (hours) return hours + " h " + String(minutes).padStart(2, "0") + " min";
  if (minutes) return minutes + " min " + String(whole % 60).padStart(2, "0") + " s";
  return whole + " s";
}

// Rounds down: only a complete part is shown as 100 %.
export function percent(fraction) {
  return (Math.floor(Math.min(1, Math.max(0, fraction)) * 1000) / 10).toFixed(1) + " %";
}

// Formats a time as briefly as possible.
export function moment(unixMs, now) {
  const then = new Date(unixMs);
  const time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  return then.toDateString() === new Date(now).toDateString() ? time
    : then.toLocaleDateString([], { day: "numeric", month: "short" }) + " " + time;
}

function three(value) {
  return value >= 100 ? Math.round(value).toString() : value.toPrecision(3);
}
