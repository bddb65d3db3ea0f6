// What the page uses of DOMPurify.
declare const purify: {
  sanitize(html: string, options: object): DocumentFragment;
  addHook(name: string, hook: (node: Element) => void): void;
};
export default purify;
