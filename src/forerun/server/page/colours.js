// Colours the tokens that drafters proposed, by the browser's highlights, which change no element.

const places = new Map(); // drafter -> its colour
const painted = new WeakMap(); // element -> ranges by colour
const COLOURS = 5;
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
 * Colour what is shown in an element of an answer, of which signs of Markdown are left out.
 * @param {Element} element
 * @param {[string, string | null][]} drafts  pieces of the answer with their drafters
 */
export function paint(element, drafts) {
  if (!("highlights" in CSS)) return; // an older browser shows the text alone
  unpaint(element);
  const raw = drafts.map(([text]) => text).join("");
  const ends = []; // of the pieces in it
  for (const [text] of drafts) ends.push((ends.at(-1) ?? 0) + text.length);
  const found = [];
  let at = 0; // in the answer
  let piece = 0;
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement?.closest(".bar")) continue;
    const text = node.textContent ?? "";
    for (let start = 0; start < text.length; ) {
      const place = raw.indexOf(text[start], at);
      if (place === -1 || place > at + REACH) {
        start += 1;
        continue;
      }
      while (ends[piece] <= place) piece += 1;
      let end = start + 1; // the run of equal characters within this piece
      at = place + 1;
      while (end < text.length && at < ends[piece] && text[end] === raw[at]) (end += 1), (at += 1);
      const drafter = drafts[piece][1];
      if (drafter) found.push([colourOf(drafter), range(node, start, end)]);
      start = end;
    }
  }
  for (const [colour, each] of found) highlight(colour).add(each);
  painted.set(element, found);
}

/** @param {Node} node @param {number} start @param {number} end */
function range(node, start, end) {
  return new StaticRange({ startContainer: node, startOffset: start, endContainer: node, endOffset: end });
}
