//! JSON Patch (RFC 6902) and JSON Merge Patch (RFC 7396) on values.

use std::fmt;

use serde_json::{Map, Value};

/// Why a patch was not applied.
#[derive(Debug, PartialEq, Eq)]
pub enum PatchError {
    /// The document is not a patch (the API server answers 400).
    Malformed(String),
    /// The patch does not apply to this object, a failed `test` included (422).
    NotApplicable(String),
}

impl fmt::Display for PatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(why) | Self::NotApplicable(why) => f.write_str(why),
        }
    }
}

/// Applies a JSON Patch; `target` is unchanged on error.
pub fn apply(target: &Value, patch: &Value) -> Result<Value, PatchError> {
    let operations = patch
        .as_array()
        .ok_or_else(|| PatchError::Malformed("a JSON patch is an array of operations".to_owned()))?;
    let mut result = target.clone();
    for operation in operations {
        apply_operation(&mut result, operation)?;
    }
    Ok(result)
}

/// Applies a merge patch.
pub fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(members) = target else { return };
    for (name, value) in patch {
        if value.is_null() {
            members.remove(name);
        } else {
            merge(members.entry(name.clone()).or_insert(Value::Null), value);
        }
    }
}

fn apply_operation(target: &mut Value, operation: &Value) -> Result<(), PatchError> {
    let text = |member: &str| {
        operation
            .get(member)
            .and_then(Value::as_str)
            .ok_or_else(|| PatchError::Malformed(format!("patch operation without {member}")))
    };
    let value = || {
        operation
            .get("value")
            .cloned()
            .ok_or_else(|| PatchError::Malformed("patch operation without value".to_owned()))
    };
    let word = text("op")?;
    let path = parse_pointer(text("path")?)?;
    match word {
        "add" => add(target, &path, value()?),
        "remove" => remove(target, &path).map(drop),
        "replace" => {
            let value = value()?;
            replace(target, &path, value)
        }
        "move" => {
            let from = parse_pointer(text("from")?)?;
            let value = remove(target, &from)?;
            add(target, &path, value)
        }
        "copy" => {
            let from = parse_pointer(text("from")?)?;
            let value = find(target, &from)?.clone();
            add(target, &path, value)
        }
        "test" => {
            let wanted = value()?;
            // A missing member equals null, as in the API server's library.
            let found = find(target, &path).map_or(Value::Null, |value| value.clone());
            if found == wanted {
                Ok(())
            } else {
                Err(PatchError::NotApplicable(format!("testing value {} failed", text("path")?)))
            }
        }
        _ => Err(PatchError::Malformed(format!("unknown patch operation {word:?}"))),
    }
}

fn parse_pointer(pointer: &str) -> Result<Vec<String>, PatchError> {
    if pointer.is_empty() {
        return Ok(Vec::new());
    }
    let tokens = pointer
        .strip_prefix('/')
        .ok_or_else(|| PatchError::NotApplicable(format!("{pointer:?} is not a JSON pointer")))?;
    Ok(tokens.split('/').map(|token| token.replace("~1", "/").replace("~0", "~")).collect())
}

fn missing(token: &str) -> PatchError {
    PatchError::NotApplicable(format!("missing value at {token:?}"))
}

fn find<'a>(target: &'a mut Value, path: &[String]) -> Result<&'a mut Value, PatchError> {
    let mut current = target;
    for token in path {
        current = match current {
            Value::Object(members) => members.get_mut(token),
            Value::Array(items) => token.parse().ok().and_then(|index: usize| items.get_mut(index)),
            _ => None,
        }
        .ok_or_else(|| missing(token))?;
    }
    Ok(current)
}

fn add(target: &mut Value, path: &[String], value: Value) -> Result<(), PatchError> {
    let Some((last, parents)) = path.split_last() else {
        *target = value;
        return Ok(());
    };
    match find(target, parents)? {
        Value::Object(members) => {
            members.insert(last.clone(), value);
        }
        Value::Array(items) => {
            let index = if last == "-" { items.len() } else { last.parse().map_err(|_| missing(last))? };
            if index > items.len() {
                return Err(missing(last));
            }
            items.insert(index, value);
        }
        _ => return Err(missing(last)),
    }
    Ok(())
}

/// The API server's library lets `replace` add a member that is not there, unlike RFC 6902.
fn replace(target: &mut Value, path: &[String], value: Value) -> Result<(), PatchError> {
    if let Some((last, parents)) = path.split_last()
        && let Value::Object(members) = find(target, parents)?
    {
        members.insert(last.clone(), value);
        return Ok(());
    }
    *find(target, path)? = value;
    Ok(())
}

fn remove(target: &mut Value, path: &[String]) -> Result<Value, PatchError> {
    let Some((last, parents)) = path.split_last() else {
        return Err(PatchError::NotApplicable("the whole document cannot be removed".to_owned()));
    };
    match find(target, parents)? {
        Value::Object(members) => members.remove(last).ok_or_else(|| missing(last)),
        Value::Array(items) => match last.parse() {
            Ok(index) if index < items.len() => Ok(items.remove(index)),
            _ => Err(missing(last)),
        },
        _ => Err(missing(last)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn operations() {
        let target = json!({"metadata": {"annotations": {"a/b": "1"}}, "list": [1, 2]});
        let patch = json!([
            {"op": "test", "path": "/metadata/annotations/a~1b", "value": "1"},
            {"op": "test", "path": "/missing", "value": null},
            {"op": "replace", "path": "/metadata/annotations/a~1b", "value": "2"},
            {"op": "replace", "path": "/metadata/labels", "value": {}},
            {"op": "add", "path": "/list/1", "value": 9},
            {"op": "add", "path": "/list/-", "value": 7},
            {"op": "remove", "path": "/list/0"},
            {"op": "copy", "from": "/list", "path": "/copied"},
            {"op": "move", "from": "/metadata", "path": "/moved"},
        ]);
        assert_eq!(
            apply(&target, &patch).unwrap(),
            json!({"moved": {"annotations": {"a/b": "2"}, "labels": {}}, "list": [9, 2, 7], "copied": [9, 2, 7]})
        );
    }

    #[test]
    fn what_does_not_apply() {
        let target = json!({"a": {"b": 1}, "l": [1]});
        for patch in [
            json!([{"op": "test", "path": "/a/b", "value": 2}]),
            json!([{"op": "replace", "path": "/c/c", "value": 2}]),
            json!([{"op": "replace", "path": "/l/1", "value": 2}]),
            json!([{"op": "remove", "path": "/a/c"}]),
            json!([{"op": "add", "path": "/x/y", "value": 2}]),
            json!([{"op": "add", "path": "/l/2", "value": 2}]),
            json!([{"op": "remove", "path": "/l/1"}]),
        ] {
            assert!(matches!(apply(&target, &patch), Err(PatchError::NotApplicable(_))), "{patch}");
        }
        for patch in
            [json!({}), json!([{"op": "frobnicate", "path": "/a"}]), json!([{"op": "add", "path": "/a"}])]
        {
            assert!(matches!(apply(&target, &patch), Err(PatchError::Malformed(_))), "{patch}");
        }
    }

    #[test]
    fn merging() {
        let mut target = json!({"a": {"b": 1, "c": 2}, "l": [1, 2]});
        merge(&mut target, &json!({"a": {"b": null, "d": {"e": null, "f": 1}}, "l": [3]}));
        assert_eq!(target, json!({"a": {"c": 2, "d": {"f": 1}}, "l": [3]}));
    }
}
