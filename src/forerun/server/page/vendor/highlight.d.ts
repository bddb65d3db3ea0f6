// What the page uses of highlight.js.
declare const hljs: {
  getLanguage(name: string): object | undefined;
  highlight(text: string, options: { language: string }): { value: string };
};
export default hljs;
