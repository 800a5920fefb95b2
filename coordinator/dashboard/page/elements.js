// Changes elements in place, and only where something is new. Text is set as text, never as HTML.

export function byId(id) {
  return document.getElementById(id);
}

export function element(tag, text = "", properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  made.textContent = text;
  return made;
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// Gives `parent` one child for each item, in the order of the items. `create` makes a child, `update` fills a child.
export function setChildren(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const name = String(key(item));
    let child = old.get(name);
    old.delete(name);
    if (!child) {
      child = create(item);
      child.dataset.key = name;
    }
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
    update(child, item);
  });
  for (const child of old.values()) child.remove();
}

// Returns the value of a custom property of the style sheet, which differs between light and dark mode.
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
