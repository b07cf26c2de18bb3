// The only place where text gets into the page: as text nodes, since names and details come from
// other processes. Nothing is written again that has not changed, so focus and selection stay.

export const at = id => document.getElementById(id);

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text != null) made.textContent = text;
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, className) {
  if (node.className !== className) node.className = className;
}

// Makes `parent` hold exactly `nodes`, and moves only those that are out of place.
export function setChildren(parent, nodes) {
  const kept = new Set(nodes);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}

// Nodes by key: those of before are used again, new ones are made, and the others are forgotten.
export class Keyed {
  constructor(make) {
    this.make = make;
    this.nodes = new Map();
  }

  take(keys) {
    const before = this.nodes;
    this.nodes = new Map(keys.map(key => [key, before.get(key) ?? this.make(key)]));
    return [...this.nodes.values()];
  }
}
