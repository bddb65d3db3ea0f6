// What the page uses of marked.
export class Marked {
  constructor(options: { gfm: boolean; renderer: Record<string, (this: any, token: any) => string> });
  parse(text: string, options: { async: false }): string;
}
