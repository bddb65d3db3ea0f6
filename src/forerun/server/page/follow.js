// Scrolls along with a growing text, unless the person scrolled up.

/** Follows the end of what scrolls. */
export class Follow {
  #follows = true;
  #last = 0; // where the box was
  #touched = -Infinity; // when the person did something that may scroll

  /** @param {HTMLElement} box  that scrolls @param {HTMLElement} button  leads to the end, and is there off it */
  constructor(box, button) {
    this.box = box;
    this.button = button;
    button.addEventListener("click", () => this.toEnd());
    box.addEventListener("scroll", () => this.#look(), { passive: true });
    for (const name of ["wheel", "touchmove", "keydown", "pointerdown", "pointermove"]) {
      box.addEventListener(name, (event) => this.#mayScroll(event), { passive: true });
    }
    new ResizeObserver(() => this.grown()).observe(box);
    for (const child of box.children) new ResizeObserver(() => this.grown()).observe(child);
  }

  get #rest() {
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    return scrollHeight - scrollTop - clientHeight;
  }

  /** @param {any} event */
  #mayScroll(event) {
    if (event.type !== "pointermove" || event.buttons) this.#touched = performance.now();
  }

  #look() {
    const { scrollTop } = this.box;
    const isPersons = performance.now() - this.#touched < 1000; // else the text became shorter for a moment
    if (this.#rest < 30) this.#follows = true;
    else if (isPersons && scrollTop < this.#last - 2) this.#follows = false;
    this.#last = scrollTop;
    if (this.#follows) this.grown();
    this.button.hidden = this.#follows || this.#rest < 30;
  }

  /** Go to the end, and follow it. */
  toEnd() {
    this.#follows = true;
    this.grown();
  }

  /** Go along, where the end is followed. */
  grown() {
    if (this.#follows) this.box.scrollTop = this.box.scrollHeight;
    this.button.hidden = this.#follows || this.#rest < 30;
  }
}
