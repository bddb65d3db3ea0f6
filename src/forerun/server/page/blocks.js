// Divides a growing Markdown text into blocks, each small enough to be rendered within a frame.
//
// A text is read once: while it grows, only its last blocks are read again.

/**
 * @typedef {object} Block
 * @property {string} text  of code without its fences
 * @property {number} start  in the whole text
 * @property {string | null} language  of fenced code; null for other text
 * @property {number} fence  start of its fence, which several blocks may share; -1
 * @property {boolean} isOpen  its fence has not ended
 * @property {boolean} isPlain  a line that is too long to be Markdown
 */

const MOST_TEXT = 4000;
const MOST_CODE = 12000;
const FENCE = /^( *)(`{3,}|~{3,})[ \t]*([^`]*)$/;
const TABLE = /^ *\|.*\n[ |:-]+\n/; // the head of a table at the start of a block
const ITEM = /^ {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)/;

/** Reads a text line by line. */
class Reader {
  /** @type {Block[]} */ found = [];
  /** @type {Block | null} */ #block = null;
  #closing = /$^/; // of the open fence
  #indent = /^/; // of its first line, which is taken from all
  #isGap = false; // blank lines were before this one
  #isList = false; // of the block

  /** @param {number} start @param {Partial<Block>} [more] */
  #begin(start, more = {}) {
    const block = { text: "", language: null, fence: -1, isOpen: false, isPlain: false, ...more, start };
    this.#block = block;
    this.found.push(block);
    return block;
  }

  /** Read a line. @param {string} line  with its end @param {number} at  its start */
  read(line, at) {
    if (this.#block?.isOpen) return this.#readCode(this.#block, line, at);
    const isIndented = /^( {2,}|\t)/.test(line);
    const fence = line.length < 200 ? FENCE.exec(line.trimEnd()) : null;
    if (!line.trim()) {
      this.#isGap = true;
      if (this.#block) this.#block.text += line;
    } else if (fence && !(this.#isList && this.#block && isIndented)) {
      this.#closing = new RegExp(`^${fence[2][0]}{${fence[2].length},}$`);
      this.#indent = new RegExp(`^ {0,${fence[1].length}}`);
      this.#begin(at, { fence: at, isOpen: true, language: fence[3].trim().split(/\s/)[0] });
      this.#isGap = false;
    } else this.#readText(line, at, isIndented);
  }

  /** @param {Block} block @param {string} line @param {number} at */
  #readCode(block, line, at) {
    if (this.#closing.test(line.trim())) {
      for (let last = this.found.length - 1; this.found[last]?.fence === block.fence; last--)
        this.found[last].isOpen = false;
      this.#block = null;
      return;
    }
    if (block.text.length + line.length > MOST_CODE) block = this.#begin(at, { ...block, text: "" });
    block.text += line.replace(this.#indent, "");
  }

  /** @param {string} line @param {number} at @param {boolean} isIndented */
  #readText(line, at, isIndented) {
    const isItem = ITEM.test(line);
    const goesOn = !this.#isGap || isIndented || (this.#isList && isItem);
    let block = this.#block;
    if (!block || !goesOn || block.isPlain || block.text.length + line.length > MOST_TEXT) {
      const head = goesOn && TABLE.exec(block?.text ?? "")?.[0]; // of a table that is too long for a block
      block = this.#begin(at, { isPlain: line.length > MOST_TEXT, text: head || "" });
      this.#isList = isItem;
    }
    block.text += line;
    this.#isGap = false;
  }
}

/** Return the blocks of a text from one place on. @param {string} text @param {number} [from] a block's start, no fence's
 * @returns {Block[]} */
export function blocks(text, from = 0) {
  const reader = new Reader();
  for (let at = from; at < text.length;) {
    const end = text.indexOf("\n", at) + 1 || text.length;
    const line = text.slice(at, Math.min(end, at + MOST_CODE));
    reader.read(line, at);
    at += line.length;
  }
  return reader.found;
}

/** The blocks of a text that grows. */
export class Blocks {
  #text = "";
  /** @type {Block[]} */ all = [];

  /** Read the text, which may be longer than before, or another. @param {string} text
   * @returns {number} of the first block that is new or has changed */
  read(text) {
    const kept = text.startsWith(this.#text) ? this.#lastWhole() : 0;
    const from = kept ? this.all[kept].start : 0;
    this.all = [...this.all.slice(0, kept), ...blocks(text, from)];
    this.#text = text;
    return kept;
  }

  /** Return the place of the last block from which reading may begin again. */
  #lastWhole() {
    for (let place = this.all.length - 1; place > 0; place--) {
      const { fence, start } = this.all[place];
      if (fence === -1 || fence === start) return place; // what follows may yet belong to it
    }
    return 0;
  }
}
