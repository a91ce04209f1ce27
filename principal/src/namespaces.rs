//! `--allowed-namespaces`: shell-style patterns, or regular expressions between slashes.

use regex::Regex;

/// A list of patterns.
#[derive(Debug, Default)]
pub struct Namespaces(Vec<Regex>);

impl Namespaces {
    /// Compiles the patterns. A pattern that is not one matches nothing, which is for the log.
    pub fn parse(patterns: &[String], warnings: &mut Vec<String>) -> Result<Self, String> {
        let mut out = Vec::new();
        for pattern in patterns {
            let inside = pattern.strip_prefix('/').and_then(|rest| rest.strip_suffix('/'));
            if let Some(expression) = inside {
                let regex = Regex::new(expression).map_err(|error| {
                    format!(
                        "--allowed-namespaces {pattern}: this regular expression is not supported: {error}"
                    )
                })?;
                out.push(regex);
            }
            // A regular expression is tried as a glob too, as in the reference.
            match glob(pattern) {
                Some(regex) => out.push(regex),
                None if inside.is_some() => {}
                None => {
                    warnings.push(format!("--allowed-namespaces {pattern}: not a pattern, matches nothing"))
                }
            }
        }
        Ok(Self(out))
    }

    /// Whether any pattern matches. No patterns: nothing does.
    pub fn admit(&self, namespace: &str) -> bool {
        self.0.iter().any(|regex| regex.is_match(namespace))
    }
}

/// `*`, `?`, `[abc]`, `[a-z]`, `[!a]`, `{a,b}` and `\`, anchored at both ends.
fn glob(pattern: &str) -> Option<Regex> {
    let mut out = String::from("(?s)\\A(?:");
    let mut depth = 0;
    let mut chars = pattern.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '*' => {
                while chars.next_if_eq(&'*').is_some() {}
                out.push_str(".*");
            }
            '?' => out.push('.'),
            '{' => {
                depth += 1;
                out.push_str("(?:");
            }
            '}' if depth > 0 => {
                depth -= 1;
                out.push(')');
            }
            ',' if depth > 0 => out.push('|'),
            '[' => {
                out.push('[');
                if chars.next_if_eq(&'!').is_some() {
                    out.push('^');
                }
                let mut members = 0;
                loop {
                    match chars.next()? {
                        ']' if members > 0 => break,
                        ']' => return None,
                        '-' if members > 0 && chars.peek().is_some_and(|next| *next != ']') => out.push('-'),
                        '\\' => out.push_str(&regex::escape(chars.next()?.encode_utf8(&mut [0; 4]))),
                        other => {
                            // Inside brackets these mean something to the regular expression.
                            if "^&~-[".contains(other) {
                                out.push('\\');
                            }
                            out.push(other);
                        }
                    }
                    members += 1;
                }
                out.push(']');
            }
            '\\' => {
                if let Some(next) = chars.next() {
                    out.push_str(&regex::escape(next.encode_utf8(&mut [0; 4])));
                }
            }
            other => out.push_str(&regex::escape(other.encode_utf8(&mut [0; 4]))),
        }
    }
    out.extend(std::iter::repeat_n(')', depth + 1));
    out.push_str("\\z");
    Regex::new(&out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(pattern: &str, namespace: &str) -> bool {
        Namespaces::parse(&[pattern.to_owned()], &mut Vec::new()).unwrap().admit(namespace)
    }

    #[test]
    fn patterns() {
        for (pattern, namespace, expected) in [
            ("*", "agent-1", true),
            ("agent-*", "agent-1", true),
            ("agent-*", "other", false),
            ("agent-?", "agent-12", false),
            ("agent-[0-3]", "agent-2", true),
            ("agent-[!0-3]", "agent-2", false),
            ("{shop,turbine}-*", "turbine-9", true),
            ("a.b", "axb", false),
            ("a\\*", "a*", true),
            ("/^shop-[0-9]+$/", "shop-12", true),
            ("/shop/", "my-shop-1", true),
            ("/^shop$/", "shops", false),
            ("/", "/", true),
            ("//", "anything", true),
            ("[", "[", false),
            ("[z-a]", "b", false),
            ("", "", true),
        ] {
            assert_eq!(admits(pattern, namespace), expected, "{pattern} {namespace}");
        }
        assert!(!Namespaces::default().admit("agent-1"));
        assert!(Namespaces::parse(&["/(?=x)/".to_owned()], &mut Vec::new()).is_err());
    }
}
