//! `--allowed-namespaces`: shell-style patterns, or regular expressions between slashes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use agent_core::glob::{self, Glob};
use regex::Regex;

/// A list of patterns.
#[derive(Debug, Default)]
pub struct Namespaces(Vec<Pattern>);

#[derive(Debug)]
enum Pattern {
    Regex(Regex),
    Glob(Glob),
}

impl Namespaces {
    /// Compiles the patterns. A pattern that is not one matches nothing, which is for the log.
    pub fn parse(patterns: &[String], warnings: &mut Vec<String>) -> Result<Self, String> {
        let mut out = Vec::new();
        for pattern in patterns {
            let inside = glob::expression(pattern);
            if let Some(expression) = inside {
                let regex = Regex::new(expression).map_err(|error| {
                    format!(
                        "--allowed-namespaces {pattern}: this regular expression is not supported: {error}"
                    )
                })?;
                out.push(Pattern::Regex(regex));
            }
            // A regular expression is tried as a glob too, as in the reference.
            match Glob::parse(pattern) {
                Ok(glob) => out.push(Pattern::Glob(glob)),
                Err(_) if inside.is_some() => {}
                Err(_) => {
                    warnings.push(format!("--allowed-namespaces {pattern}: not a pattern, matches nothing"))
                }
            }
        }
        Ok(Self(out))
    }

    /// Whether any pattern matches. No patterns: nothing does.
    pub fn admit(&self, namespace: &str) -> bool {
        self.0.iter().any(|pattern| match pattern {
            Pattern::Regex(regex) => regex.is_match(namespace),
            Pattern::Glob(glob) => glob.is_match(namespace),
        })
    }
}

/// Whether a regular expression matches; one that is not understood matches nothing. For the lists of namespaces in projects.
pub fn regex(expression: &str, text: &str) -> bool {
    // A project is asked about once for each agent.
    static COMPILED: Mutex<BTreeMap<String, Option<Regex>>> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if !compiled.contains_key(expression) {
        if compiled.len() >= COMPILED_MAX {
            compiled.clear();
        }
        compiled.insert(expression.to_owned(), Regex::new(expression).ok());
    }
    compiled.get(expression).is_some_and(|regex| regex.as_ref().is_some_and(|regex| regex.is_match(text)))
}

/// Expressions kept compiled; hubs have a handful.
const COMPILED_MAX: usize = 256;

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
