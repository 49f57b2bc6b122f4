// Makes elements, and changes those that are shown as little as possible: animations, focus and selections go on.

const SVG = "http://www.w3.org/2000/svg";

// Makes an HTML element. Functions become handlers; null, false and undefined are left out.
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

// Makes an SVG element.
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function fill(element, attributes, children) {
  element.handlers = {};
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.handlers[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  Object.assign(element, element.handlers);
  element.append(...nodes(children));
  return element;
}

const nodes = (children) =>
  children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "")
    .map((child) => (child instanceof Node ? child : document.createTextNode(child)));

// Shows children in an element. What is alike stays; the attribute `data-own` marks an element whose content stays as it is.
export function show(parent, ...children) {
  morphChildren(parent, nodes(children));
}

function morphChildren(parent, wanted) {
  let old = parent.firstChild;
  for (const node of wanted) {
    if (old && isAlike(old, node)) {
      const next = old.nextSibling;
      morph(old, node);
      old = next;
    } else parent.insertBefore(node, old);
  }
  while (old) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
}

const isAlike = (one, other) => one.nodeName === other.nodeName && one.dataset?.key === other.dataset?.key;

function morph(old, node) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.nodeValue !== node.nodeValue) old.nodeValue = node.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!node.hasAttribute(name) && name !== "style" && name !== "open") old.removeAttribute(name);
  }
  // Whoever opens or closes a fold decides from then on.
  for (const { name, value } of node.attributes) if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const name of Object.keys(old.handlers ?? {})) old[name] = null;
  Object.assign(old, node.handlers);
  old.handlers = node.handlers;
  if (!("own" in (node.dataset ?? {}))) morphChildren(old, [...node.childNodes]);
  if (old instanceof HTMLSelectElement || old instanceof HTMLInputElement) old.value = node.value;
}
