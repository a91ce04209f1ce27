//! The subset of YAML that kubeconfig files are written in.
//!
//! Block mappings and sequences, plain and quoted scalars, comments, and empty `{}` and `[]`. Anything else (anchors,
//! tags, block scalars, several documents) is refused with its line: a wrong guess here could talk to the wrong
//! cluster. A general parser would cost the binary about 100 KB.

/// A value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Node {
    Null,
    Text(String),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

impl Node {
    /// A member of a mapping.
    pub(super) fn at(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Map(members) => members.iter().find(|(name, _)| name == key).map(|(_, node)| node),
            _ => None,
        }
    }

    /// The text of a member; `None` if it is absent, empty or no scalar.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match self.at(key) {
            Some(Self::Text(text)) if !text.is_empty() => Some(text),
            _ => None,
        }
    }

    /// The elements of a member.
    pub(super) fn list(&self, key: &str) -> &[Self] {
        match self.at(key) {
            Some(Self::List(elements)) => elements,
            _ => &[],
        }
    }
}

/// Reads one document; an error names its line.
pub(super) fn parse(text: &str) -> Result<Node, String> {
    if text.trim_start().starts_with('{') {
        let value: serde_json::Value =
            serde_json::from_str(text).map_err(|error| format!("broken JSON: {error}"))?;
        return Ok(from_json(value));
    }
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let content = line.trim_start_matches(' ');
        let trimmed = content.trim_end();
        if trimmed.is_empty() || trimmed.starts_with('#') || (trimmed == "---" && lines.is_empty()) {
            continue;
        }
        if content.starts_with('\t') {
            return Err(format!("line {}: indented with a tab", number + 1));
        }
        lines.push(Line { number: number + 1, indent: line.len() - content.len(), text: trimmed });
    }
    let mut reader = Reader { lines, at: 0, depth: 0 };
    let Some(first) = reader.lines.first() else { return Ok(Node::Null) };
    let node = reader.block(first.indent)?;
    match reader.lines.get(reader.at) {
        Some(line) => Err(format!("line {}: unexpected indentation", line.number)),
        None => Ok(node),
    }
}

fn from_json(value: serde_json::Value) -> Node {
    use serde_json::Value;
    match value {
        Value::Null => Node::Null,
        Value::String(text) => Node::Text(text),
        Value::Array(elements) => Node::List(elements.into_iter().map(from_json).collect()),
        Value::Object(members) => {
            Node::Map(members.into_iter().map(|(key, value)| (key, from_json(value))).collect())
        }
        scalar => Node::Text(scalar.to_string()),
    }
}

#[derive(Clone, Copy)]
struct Line<'a> {
    number: usize,
    indent: usize,
    text: &'a str,
}

struct Reader<'a> {
    lines: Vec<Line<'a>>,
    at: usize,
    depth: u32,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<Line<'a>> {
        self.lines.get(self.at).copied()
    }

    /// A mapping or sequence whose lines start at `indent`.
    fn block(&mut self, indent: usize) -> Result<Node, String> {
        self.depth += 1;
        let number = self.peek().map_or(0, |line| line.number);
        if self.depth > MAX_DEPTH {
            return Err(format!("line {number}: nested too deeply"));
        }
        let node = match self.peek() {
            Some(line) if is_element(line.text) => self.sequence(indent),
            _ => self.mapping(indent),
        };
        self.depth -= 1;
        node
    }

    fn sequence(&mut self, indent: usize) -> Result<Node, String> {
        let mut elements = Vec::new();
        while let Some(line) = self.peek() {
            if line.indent != indent || !is_element(line.text) {
                break;
            }
            let rest = line.text[1..].trim_start();
            if rest.is_empty() {
                self.at += 1;
                elements.push(self.nested(indent + 1)?);
            } else if split_key(rest).is_some() || is_element(rest) {
                // The element's first line is the rest of this one, indented as it stands.
                let inner = indent + (line.text.len() - rest.len());
                self.lines[self.at] = Line { indent: inner, text: rest, ..line };
                elements.push(self.block(inner)?);
            } else {
                self.at += 1;
                elements.push(scalar(rest, line.number)?);
            }
        }
        Ok(Node::List(elements))
    }

    fn mapping(&mut self, indent: usize) -> Result<Node, String> {
        let mut members: Vec<(String, Node)> = Vec::new();
        while let Some(line) = self.peek() {
            if line.indent != indent || is_element(line.text) {
                break;
            }
            let Some((key, rest)) = split_key(line.text) else {
                return Err(format!("line {}: not a `key: value`", line.number));
            };
            let Node::Text(key) = scalar(key, line.number)? else {
                return Err(format!("line {}: not a key", line.number));
            };
            if members.iter().any(|(known, _)| *known == key) {
                return Err(format!("line {}: {key} is given twice", line.number));
            }
            self.at += 1;
            let node = if rest.is_empty() || rest.starts_with('#') {
                // A sequence may stand at the indentation of its key.
                match self.peek() {
                    Some(next) if next.indent == indent && is_element(next.text) => self.block(indent)?,
                    _ => self.nested(indent + 1)?,
                }
            } else {
                scalar(rest, line.number)?
            };
            members.push((key, node));
        }
        Ok(Node::Map(members))
    }

    /// A block that is indented by at least `least`, or nothing.
    fn nested(&mut self, least: usize) -> Result<Node, String> {
        match self.peek() {
            Some(line) if line.indent >= least => self.block(line.indent),
            _ => Ok(Node::Null),
        }
    }
}

fn is_element(text: &str) -> bool {
    text == "-" || text.starts_with("- ")
}

/// Key and value text of `key: value`.
fn split_key(text: &str) -> Option<(&str, &str)> {
    let from = match text.as_bytes().first()? {
        quote @ (b'"' | b'\'') => text[1..].find(char::from(*quote))? + 2,
        _ => 0,
    };
    let colon = from
        + text[from..]
            .char_indices()
            .find(|(at, c)| *c == ':' && text[from + at + 1..].chars().next().is_none_or(|next| next == ' '))?
            .0;
    Some((text[..colon].trim_end(), text[colon + 1..].trim_start()))
}

fn scalar(text: &str, number: usize) -> Result<Node, String> {
    let refuse = |what: &str| Err(format!("line {number}: {what} cannot be read here"));
    let rest = |tail: &str| tail.trim().is_empty() || tail.trim_start().starts_with('#');
    match text.as_bytes().first() {
        Some(b'"') => {
            let mut escaped = false;
            let end = text[1..].bytes().position(|byte| match byte {
                b'"' if !escaped => true,
                b'\\' => {
                    escaped = !escaped;
                    false
                }
                _ => {
                    escaped = false;
                    false
                }
            });
            match end {
                Some(end) if rest(&text[end + 2..]) => match serde_json::from_str(&text[..end + 2]) {
                    Ok(text) => Ok(Node::Text(text)),
                    Err(_) => refuse("this escape"),
                },
                _ => refuse("an unfinished quote"),
            }
        }
        Some(b'\'') => {
            let mut out = String::new();
            let mut tail = &text[1..];
            while let Some(end) = tail.find('\'') {
                out.push_str(&tail[..end]);
                tail = &tail[end + 1..];
                match tail.strip_prefix('\'') {
                    Some(more) => {
                        out.push('\'');
                        tail = more;
                    }
                    None if rest(tail) => return Ok(Node::Text(out)),
                    None => break,
                }
            }
            refuse("an unfinished quote")
        }
        Some(b'|' | b'>') => refuse("a block scalar"),
        Some(b'&' | b'*') => refuse("an anchor or alias"),
        Some(b'!') => refuse("a tag"),
        Some(b'%' | b'@' | b'`' | b'?') => refuse("this character"),
        Some(b'{' | b'[') => {
            let inner: String = text.split(" #").next().unwrap_or_default().split_whitespace().collect();
            match &*inner {
                "{}" => Ok(Node::Map(Vec::new())),
                "[]" => Ok(Node::List(Vec::new())),
                _ => refuse("a flow collection"),
            }
        }
        _ => Ok(match text.split(" #").next().unwrap_or_default().trim() {
            "null" | "~" | "" => Node::Null,
            plain => Node::Text(plain.to_owned()),
        }),
    }
}

const MAX_DEPTH: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubeconfig() {
        let text = "---\n# comment\napiVersion: v1\nclusters:\n- cluster:\n    server: https://127.0.0.1:6443 # here\n    \
                    insecure-skip-tls-verify: true\n  name: 'it''s'\ncontexts:\n  - context: {cluster: x}\n    name: no\n";
        assert_eq!(parse(text), Err("line 10: a flow collection cannot be read here".into()));
        let node = parse(&text.replace("{cluster: x}", "\n      cluster: \"a\\tb\"\n      user:")).unwrap();
        let cluster = &node.list("clusters")[0];
        assert_eq!(cluster.text("name"), Some("it's"));
        assert_eq!(cluster.at("cluster").unwrap().text("server"), Some("https://127.0.0.1:6443"));
        let context = node.list("contexts")[0].at("context").unwrap();
        assert_eq!((context.text("cluster"), context.at("user")), (Some("a\tb"), Some(&Node::Null)));
    }

    #[test]
    fn sequences_and_nesting() {
        let node = parse("a:\n  -\n    b: 1\n  - - x\n    - y\n  - z\nc: {}\nd: []\n").unwrap();
        assert_eq!(node.list("a").len(), 3);
        assert_eq!(node.list("a")[0].text("b"), Some("1"));
        assert_eq!(node.list("a")[1], Node::List(vec![Node::Text("x".into()), Node::Text("y".into())]));
        assert_eq!(node.at("c"), Some(&Node::Map(vec![])));
        assert_eq!(parse("{\"a\": [{\"b\": true}]}").unwrap().list("a")[0].text("b"), Some("true"));
        assert_eq!(parse("\n# nothing\n"), Ok(Node::Null));
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        for (text, line) in [
            ("a: |\n  x\n", "line 1"),
            ("a: 1\nb: &x 1\n", "line 2"),
            ("a: *x\n", "line 1"),
            ("a: !!str 1\n", "line 1"),
            ("a: 1\n  b: 2\n", "line 2"),
            ("a: 1\na: 2\n", "line 2"),
            ("\ta: 1\n", "line 1"),
            ("a\n", "line 1"),
            ("a: \"x\n", "line 1"),
            ("a: 'x\n", "line 1"),
            ("a: 1\n---\nb: 2\n", "line 2"),
        ] {
            assert!(parse(text).unwrap_err().starts_with(line), "{text}");
        }
        assert!(parse("{broken").is_err());
        assert!(parse(&format!("{}x", "- ".repeat(100))).is_err());
        assert!(parse(&"- \u{e9}: '".repeat(3)).is_err());
    }
}
