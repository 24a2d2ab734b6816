// Small helpers for elements.

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with properties and children; `data` and `aria` are objects of attributes. */
export function make(tag, properties = {}, ...children) {
  const { data = {}, aria = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, data);
  for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
  element.append(...children);
  return element;
}

/** A new element of SVG with attributes and children. */
export function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A button that does `act`. */
export function button(text, act, properties = {}) {
  const element = make("button", { type: "button", textContent: text, ...properties });
  element.addEventListener("click", act);
  return element;
}

/** Replace all children by these. */
export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

/** Run `act` once before the next frame, however often it is asked for. */
export function eachFrame(act) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      act();
    });
  };
}

/** Milliseconds as people read them. */
export function milliseconds(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 10 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

/** "1 token", "2 tokens". */
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
