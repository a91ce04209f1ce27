//! Query strings of lists and watches.

use std::collections::BTreeMap;
use std::time::Duration;

use super::selector::Selector;
use super::store::{ListOptions, WatchOptions};
use super::{Resource, Status};

/// A parsed query string.
#[derive(Clone, Debug, Default)]
pub struct Query(BTreeMap<String, String>);

impl Query {
    pub fn parse(query: &str) -> Self {
        let pairs = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (percent_decode(key), percent_decode(value))
        });
        Self(pairs.collect())
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub fn is_watch(&self) -> bool {
        flag(self.text("watch"))
    }

    /// `timeoutSeconds`, unless it is 0 or absent.
    pub fn watch_limit(&self) -> Option<Duration> {
        self.text("timeoutSeconds").parse().ok().filter(|seconds| *seconds > 0).map(Duration::from_secs)
    }

    pub fn list_options(&self) -> Result<ListOptions, Status> {
        let limit = match self.text("limit") {
            "" => 0,
            limit => {
                limit.parse().map_err(|_| Status::bad_request(format!("limit: Invalid value: {limit:?}")))?
            }
        };
        Ok(ListOptions {
            selector: self.selector()?,
            limit,
            r#continue: self.text("continue").to_owned(),
            resource_version: self.text("resourceVersion").to_owned(),
            exact: self.text("resourceVersionMatch") == "Exact",
        })
    }

    pub fn watch_options(&self, resource: Resource) -> Result<WatchOptions, Status> {
        let initial_events = flag(self.text("sendInitialEvents"));
        if initial_events && self.text("resourceVersionMatch") != "NotOlderThan" {
            let why = "resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            return Err(Status::invalid(resource, "", why));
        }
        Ok(WatchOptions {
            selector: self.selector()?,
            resource_version: self.text("resourceVersion").to_owned(),
            bookmarks: flag(self.text("allowWatchBookmarks")),
            initial_events,
        })
    }

    fn selector(&self) -> Result<Selector, Status> {
        Selector::parse(self.text("labelSelector"), self.text("fieldSelector")).map_err(Status::bad_request)
    }

    fn text(&self, key: &str) -> &str {
        self.0.get(key).map(String::as_str).unwrap_or_default()
    }
}

fn flag(text: &str) -> bool {
    matches!(text, "true" | "1" | "t" | "T" | "TRUE" | "True")
}

fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while let Some(&byte) = bytes.get(index) {
        let escaped = || {
            let digits = bytes.get(index + 1..index + 3)?;
            u8::from_str_radix(core::str::from_utf8(digits).ok()?, 16).ok()
        };
        match byte {
            b'+' => out.push(b' '),
            b'%' if let Some(value) = escaped() => {
                out.push(value);
                index += 2;
            }
            _ => out.push(byte),
        }
        index += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes() {
        let query = Query::parse("labelSelector=a%21%3Dtrue%2C+b&watch&limit=5&bad=%zz");
        assert_eq!(query.text("labelSelector"), "a!=true, b");
        assert_eq!(query.text("watch"), "");
        assert_eq!(query.text("bad"), "%zz");
        assert_eq!(query.list_options().unwrap().limit, 5);
        assert_eq!(Query::parse("limit=x").list_options().unwrap_err().code, 400);
    }
}
