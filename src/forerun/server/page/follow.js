// Scrolls along with a growing text, unless the person scrolled up.

/** Follows the end of what scrolls. */
export class Follow {
  #follows = true;

  /** @param {HTMLElement} box  that scrolls @param {HTMLElement} button  leads to the end, and is there off it */
  constructor(box, button) {
    this.box = box;
    this.button = button;
    button.addEventListener("click", () => this.toEnd());
    box.addEventListener("scroll", () => this.#look(), { passive: true });
    // upwards it is the person's doing, whatever has grown meanwhile
    box.addEventListener("wheel", (event) => event.deltaY < 0 && this.#leave(), { passive: true });
    new ResizeObserver(() => this.grown()).observe(box);
    for (const child of box.children) new ResizeObserver(() => this.grown()).observe(child);
  }

  get #rest() {
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    return scrollHeight - scrollTop - clientHeight;
  }

  #leave() {
    if (this.box.scrollHeight > this.box.clientHeight) this.#follows = false;
  }

  #last = 0;
  #look() {
    const { scrollTop } = this.box;
    if (this.#rest < 30) this.#follows = true;
    else if (scrollTop < this.#last - 2) this.#follows = false;
    this.#last = scrollTop;
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
