// A table that scrolls in its own box, with rows that stay the same nodes while they are drawn again.
//
// A column is {head, cell(row)} and may say: isNumber, isName, isLong, tone(row), or button(row), which gives
// null or {label, act}.

import {Keyed, element, setChildren, setClass, setText} from "./dom.js";

const MAX_TITLE = 2000;

export class Table {
  constructor(name, {title, columns, keyOf, isWhole = false}) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.section = element("section");
    this.section.setAttribute("aria-labelledby", `${name}-title`);
    this.section.id = name;
    const heading = element("h2", "", `${title} `);
    heading.id = `${name}-title`;
    this.note = element("span", "quiet");
    heading.append(this.note);
    this.box = element("div", isWhole ? "scroll whole" : "scroll");
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", `${title}, table`);
    this.body = element("tbody");
    this.rows = new Keyed(() => makeRow(columns));
    const table = element("table");
    table.append(element("caption", "", title), makeHead(columns), this.body);
    this.box.append(table);
    const observer = new ResizeObserver(() => this.markScrolling());
    observer.observe(this.box);
    observer.observe(table);
    this.section.append(heading, this.box);
  }

  draw(rows, note = "") {
    setText(this.note, rows.length ? note : "none");
    this.box.hidden = !rows.length;
    const keys = uniqueKeys(rows, this.keyOf);
    const nodes = this.rows.take(keys);
    nodes.forEach((node, index) => drawRow(node, this.columns, rows[index]));
    setChildren(this.body, nodes);
  }

  // A box that scrolls is reached by keyboard; one that does not is no stop on the way.
  markScrolling() {
    const {box} = this;
    const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (scrolls) box.tabIndex = 0; else box.removeAttribute("tabindex");
  }
}

function uniqueKeys(rows, keyOf) {
  const seen = new Map();
  return rows.map(row => {
    const key = keyOf(row), count = seen.get(key) ?? 0;
    seen.set(key, count + 1);
    return count ? `${key}#${count}` : key;
  });
}

const classOf = column => column.isNumber ? "number" : column.button ? "press" : "";

function makeHead(columns) {
  const head = element("thead"), line = element("tr");
  for (const column of columns) {
    const cell = element("th", classOf(column), column.head);
    cell.scope = "col";
    line.append(cell);
  }
  head.append(line);
  return head;
}

function makeRow(columns) {
  const line = element("tr");
  columns.forEach((column, index) => line.append(makeCell(column, index === 0)));
  return line;
}

function makeCell(column, isFirst) {
  const cell = element(isFirst && !column.isMoment ? "th" : "td", classOf(column));
  if (cell.tagName === "TH") cell.scope = "row";
  if (column.button) {
    const button = element("button", "small");
    button.type = "button";
    button.addEventListener("click", () => button.act());
    cell.append(button);
  } else if (column.isLong || column.isName || column.tone) {
    cell.append(element("span", column.isLong ? "long" : column.isName ? "name" : ""));
  }
  return cell;
}

function drawRow(node, columns, row) {
  columns.forEach((column, index) => {
    const cell = node.children[index], inner = cell.firstElementChild;
    if (column.button) drawButton(inner, column.button(row));
    else setText(inner ?? cell, String(column.cell(row)));
    if (column.isLong || column.isName) inner.title = inner.textContent.slice(0, MAX_TITLE);  // it may be cut short
    if (column.tone) setClass(inner, column.tone(row));
  });
}

function drawButton(button, wanted) {
  button.hidden = !wanted;
  if (!wanted) return;
  setText(button, wanted.label);
  button.setAttribute("aria-label", wanted.name);
  button.act = wanted.act;
}
