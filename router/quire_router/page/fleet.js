export class Fleet { restart() {} }
