//! Label and field selectors.

use serde_json::Value;

/// What a list or a watch is narrowed to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<FieldRequirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Operator {
    Exists,
    DoesNotExist,
    In(Vec<String>),
    NotIn(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FieldRequirement {
    field: &'static str,
    value: String,
    equal: bool,
}

impl Selector {
    /// Parses `labelSelector` and `fieldSelector`; empty strings select everything.
    pub fn parse(labels: &str, fields: &str) -> Result<Self, String> {
        Ok(Self { labels: parse_labels(labels)?, fields: parse_fields(fields)? })
    }

    /// Whether nothing is narrowed.
    pub fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Whether `object` is selected.
    pub fn matches(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        let labels = &metadata["labels"];
        self.labels.iter().all(|requirement| requirement.matches(labels))
            && self.fields.iter().all(|requirement| {
                let value = metadata[requirement.field].as_str().unwrap_or_default();
                (value == requirement.value) == requirement.equal
            })
    }
}

impl Requirement {
    fn matches(&self, labels: &Value) -> bool {
        let value = labels.get(&self.key).and_then(Value::as_str);
        match &self.operator {
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::In(values) => value.is_some_and(|value| values.iter().any(|wanted| wanted == value)),
            // An absent label satisfies `!=` and `notin`.
            Operator::NotIn(values) => {
                !value.is_some_and(|value| values.iter().any(|wanted| wanted == value))
            }
        }
    }
}

fn parse_labels(text: &str) -> Result<Vec<Requirement>, String> {
    let mut requirements = Vec::new();
    for term in split_outside_parentheses(text) {
        let term = term.trim();
        if term.is_empty() {
            continue;
        }
        requirements.push(parse_term(term)?);
    }
    Ok(requirements)
}

fn parse_term(term: &str) -> Result<Requirement, String> {
    let requirement = |key: &str, operator| -> Result<Requirement, String> {
        let key = key.trim();
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte);
        if key.is_empty() || !key.bytes().all(plain) {
            return Err(format!("unable to parse requirement: invalid label key {key:?}"));
        }
        Ok(Requirement { key: key.to_owned(), operator })
    };
    if let Some(open) = term.find('(') {
        let (head, rest) = term.split_at(open);
        let list = rest
            .strip_prefix('(')
            .and_then(|rest| rest.strip_suffix(')'))
            .ok_or_else(|| format!("unable to parse requirement: {term:?}"))?;
        let values = list.split(',').map(|value| value.trim().to_owned()).collect();
        let (key, word) = head
            .trim()
            .rsplit_once(char::is_whitespace)
            .ok_or_else(|| format!("unable to parse requirement: {term:?}"))?;
        return match word {
            "in" => requirement(key, Operator::In(values)),
            "notin" => requirement(key, Operator::NotIn(values)),
            _ => Err(format!("unable to parse requirement: unknown operator {word:?}")),
        };
    }
    if let Some((key, value)) = term.split_once("!=") {
        return requirement(key, Operator::NotIn(vec![value.trim().to_owned()]));
    }
    if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        return requirement(key, Operator::In(vec![value.trim().to_owned()]));
    }
    match term.strip_prefix('!') {
        Some(key) => requirement(key, Operator::DoesNotExist),
        None => requirement(term, Operator::Exists),
    }
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0usize, 0);
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                parts.push(&text[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn parse_fields(text: &str) -> Result<Vec<FieldRequirement>, String> {
    let mut requirements = Vec::new();
    for term in text.split(',').filter(|term| !term.is_empty()) {
        let (field, value, equal) = if let Some((field, value)) = term.split_once("!=") {
            (field, value, false)
        } else if let Some((field, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
            (field, value, true)
        } else {
            return Err(format!("invalid selector: {term:?}; can't understand {term:?}"));
        };
        let field = match field {
            "metadata.name" => "name",
            "metadata.namespace" => "namespace",
            _ => return Err(format!("field label not supported: {field}")),
        };
        requirements.push(FieldRequirement { field, value: value.to_owned(), equal });
    }
    Ok(requirements)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn selects(labels: &str, fields: &str) -> bool {
        let object = json!({"metadata": {
            "name": "guestbook", "namespace": "argocd",
            "labels": {"app": "web", "example.com/tier": "front"}
        }});
        Selector::parse(labels, fields).unwrap().matches(&object)
    }

    #[test]
    fn labels() {
        for yes in [
            "",
            "app",
            "app=web",
            "app==web",
            "app in (api, web)",
            "app notin (api)",
            "!missing",
            "missing!=x",
            "missing notin (x,y)",
            "app=web,example.com/tier in (front,back),!missing",
        ] {
            assert!(selects(yes, ""), "{yes}");
        }
        for no in
            ["!app", "app=api", "app!=web", "app in (api)", "app notin (web)", "missing", "app=web,missing"]
        {
            assert!(!selects(no, ""), "{no}");
        }
        for bad in ["app ~ web", "app in web", "app in (web", "=x", "a b"] {
            assert!(Selector::parse(bad, "").is_err(), "{bad}");
        }
    }

    #[test]
    fn fields() {
        assert!(selects("", "metadata.name=guestbook"));
        assert!(selects("", "metadata.name==guestbook,metadata.namespace=argocd"));
        assert!(selects("", "metadata.name!=other"));
        assert!(!selects("", "metadata.name=other"));
        assert!(Selector::parse("", "spec.project=default").is_err());
        assert!(Selector::parse("", "metadata.name").is_err());
    }
}
