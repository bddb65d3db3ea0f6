// Colours the tokens that drafters proposed, by the browser's highlights, which change no element.

const places = new Map(); // drafter -> its colour
const painted = new WeakMap(); // element -> ranges by colour
const COLOURS = 5;
const MOST = 300_000; // characters of an answer; a longer one stays as it is
const LENGTHS = [12, 4, 1]; // of what is looked for, until it is found
const REACH = 400; // characters of the answer, such as a link's address, that may not be shown

/** Return the number of a drafter's colour. @param {string} drafter @returns {number} */
export function colourOf(drafter) {
  if (!places.has(drafter)) places.set(drafter, places.size % COLOURS);
  return places.get(drafter);
}

/** @param {number} colour @returns {any} */
function highlight(colour) {
  const { highlights } = CSS;
  const name = `draft-${colour}`;
  if (!highlights.has(name)) highlights.set(name, new Highlight());
  return highlights.get(name);
}

/** Take the colours from an element. @param {Element} element */
export function unpaint(element) {
  for (const [colour, range] of painted.get(element) ?? []) highlight(colour).delete(range);
  painted.delete(element);
}

/**
 * Colour what is shown of an answer, from which signs of Markdown are left out.
 * @param {Element} element  of the answer
 * @param {Element[]} parts  of it, in the order of the answer
 * @param {[string, string | null][]} drafts  pieces of the answer with their drafters
 */
export function paint(element, parts, drafts) {
  if (!("highlights" in CSS)) return; // an older browser shows the text alone
  unpaint(element);
  const raw = drafts.map(([text]) => text).join("");
  if (raw.length > MOST || !drafts.some(([, drafter]) => drafter)) return;
  const ends = []; // of the pieces in it
  for (const [text] of drafts) ends.push((ends.at(-1) ?? 0) + text.length);
  const found = [];
  let at = 0; // in the answer
  let piece = 0;
  for (const node of parts.flatMap(textNodes)) {
    const text = node.textContent ?? "";
    for (let start = 0; start < text.length;) {
      const place = placeIn(raw, text, start, at);
      if (place === -1) {
        start += 1;
        continue;
      }
      while (ends[piece] <= place) piece += 1;
      let end = start + 1; // the run of equal characters within this piece
      at = place + 1;
      while (end < text.length && at < ends[piece] && text[end] === raw[at]) ((end += 1), (at += 1));
      const drafter = drafts[piece][1];
      if (drafter) found.push([colourOf(drafter), range(node, start, end)]);
      start = end;
    }
  }
  for (const [colour, each] of found) highlight(colour).add(each);
  painted.set(element, found);
}

/** Return the nodes of the text of a part, without the buttons of code. @param {Element} part */
function textNodes(part) {
  const found = [];
  const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) if (!walker.currentNode.parentElement?.closest(".bar")) found.push(walker.currentNode);
  return found;
}

/** Return the place in the answer of what is shown from `start` on; -1 if it is not near. @param {string} raw
 * @param {string} text @param {number} start @param {number} at  where to look from */
function placeIn(raw, text, start, at) {
  const near = raw.slice(at, at + REACH);
  for (const length of LENGTHS) {
    const place = near.indexOf(text.slice(start, start + length));
    if (place !== -1) return at + place;
  }
  return -1;
}

/** @param {Node} node @param {number} start @param {number} end */
function range(node, start, end) {
  return new StaticRange({ startContainer: node, startOffset: start, endContainer: node, endOffset: end });
}
