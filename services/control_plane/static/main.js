// Wires the page: what comes from /events and /history to what draws it.

import {Charts} from "./charts.js";
import {Commands} from "./commands.js";
import {at, setText} from "./dom.js";
import {Figures} from "./figures.js";
import {History} from "./history.js";
import {Link} from "./link.js";
import {Tables} from "./tables.js";
import {duration} from "./text.js";

const STALE_SECONDS = 3;
const LOST = "No connection to the control plane: these are its last figures. Trying again.";
const OVER = "The control plane has ended with the run: these are its last figures.";

const link = new Link({onStatus: takeStatus, onChange: showLink});
const commands = new Commands(link);
const figures = new Figures(instance => commands.writeStacks(instance));
const tables = new Tables(instance => commands.drainWorker(instance));
const history = new History(showHistory);
const charts = new Charts(history);
let status = null;

function takeStatus(received) {
  status = received;
  if (document.hidden) return;
  showStatus();
  history.refresh();
}

function showStatus() {
  figures.draw(status);
  tables.draw(status);
  commands.draw(status);
  charts.evaluations = status.evaluations;
  showAge();
}

function showHistory() {
  charts.draw();
  tables.drawEvents(history.events);
}

function showLink(isConnected) {
  const isExpected = status !== null && isEnding(status.run);
  setText(at("banner"), isConnected ? "" : isExpected ? OVER : LOST);
  at("banner").classList.toggle("quiet", isExpected);
  if (status) commands.draw(status);
  showAge();
}

// A run that was told to end takes its control plane with it, maybe before the last figures are sent.
function isEnding({state, command}) {
  return ["done", "failed"].includes(state) || ["drain", "stop"].includes(command);
}

function showAge() {
  const {age} = link;
  const isStale = age === null || age > STALE_SECONDS || !link.isConnected;
  document.body.classList.toggle("is-stale", isStale);
  setText(at("age"), age === null ? "no figures yet" : isStale ? `figures are ${duration(age)} old` : "live");
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && status) showStatus();
});
setInterval(showAge, 1000);
showHistory();
link.open();
