// How figures read, everywhere on the page. What is not known is "-".

const NONE = "-";

export function number(value, digits = 0) {
  if (value == null) return NONE;
  return value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

export function share(value) {
  return value == null ? NONE : `${number(100 * value)} %`;
}

export function mebibytes(value, digits = 0) {
  return value == null ? NONE : number(value / 1048576, digits);
}

export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// Those that are zero are left out.
export function counts(map) {
  const present = Object.entries(map).filter(([, value]) => value);
  return present.map(([key, value]) => `${key} ${number(value)}`).join(", ") || NONE;
}

// A model in a folder goes by the folder's name.
export function modelName(model) {
  return model.startsWith("/") ? model.split("/").at(-1) : model;
}

export function compact(value) {
  return value.toLocaleString("en", {notation: "compact", maximumSignificantDigits: 4});
}

const two = value => String(value).padStart(2, "0");

// `span` is how many seconds are shown: a day's clock says little about a week.
export function clock(time, span = 0) {
  const at = new Date(time * 1000);
  const hours = `${two(at.getHours())}:${two(at.getMinutes())}`;
  if (span > 172800) return `${two(at.getMonth() + 1)}-${two(at.getDate())} ${hours}`;
  return span > 1200 ? hours : `${hours}:${two(at.getSeconds())}`;
}

export function moment(time) {
  const at = new Date(time * 1000);
  const isToday = at.toDateString() === new Date().toDateString();
  const day = isToday ? "" : `${two(at.getMonth() + 1)}-${two(at.getDate())} `;
  return day + clock(time);
}
