//! What keeps the embedded API server honest: it records the shape of every request, and refuses what it does not
//! know.
//!
//! A shape is (method, path with names replaced, content type, query keys). A shape outside [`KNOWN`] is answered
//! with 501; every row of [`KNOWN`] is exercised by a conformance test that also runs on a real kube-apiserver.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::Resource;

/// Where a path leads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Route {
    /// Discovery, version, health: a path without names.
    Fixed(String),
    Collection {
        resource: Resource,
        namespace: Option<String>,
    },
    Object {
        resource: Resource,
        namespace: String,
        name: String,
    },
    /// Nothing that this server has.
    Unknown(String),
}

/// Kinds of paths, for [`Known`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    Fixed,
    /// All namespaces, or a resource without namespaces.
    WideCollection,
    NamespacedCollection,
    WideObject,
    NamespacedObject,
}

/// The shape of one request.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Shape {
    pub method: String,
    pub path: String,
    pub content_type: String,
    /// Sorted.
    pub query_keys: Vec<String>,
    /// `None`: no such path.
    pub class: Option<Class>,
}

/// Shapes that are answered.
#[derive(Debug)]
pub struct Known {
    pub method: &'static str,
    pub class: Class,
    pub content_type: &'static str,
    pub query_keys: &'static [&'static str],
}

/// Records shapes; clones share the record.
#[derive(Clone, Debug, Default)]
pub struct Closure {
    seen: Arc<Mutex<BTreeMap<Shape, u64>>>,
}

impl Route {
    /// Splits a path into what it names.
    pub fn parse(path: &str) -> Self {
        let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
        let (group, version, rest) = match segments.as_slice() {
            ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
            ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
            _ => return Self::Fixed(path.to_owned()),
        };
        let find = |plural: &str| Resource::find(group, version, plural);
        let namespaced = |plural| find(plural).filter(|resource| resource.definition().namespaced);
        let wide = |plural| find(plural).filter(|resource| !resource.definition().namespaced);
        let route = match *rest {
            [plural] => find(plural).map(|resource| Self::Collection { resource, namespace: None }),
            [plural, name] => wide(plural).map(|resource| Self::Object {
                resource,
                namespace: String::new(),
                name: name.to_owned(),
            }),
            ["namespaces", namespace, plural] => namespaced(plural)
                .map(|resource| Self::Collection { resource, namespace: Some(namespace.to_owned()) }),
            ["namespaces", namespace, plural, name] => namespaced(plural).map(|resource| Self::Object {
                resource,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            }),
            _ => None,
        };
        route.unwrap_or_else(|| Self::Unknown(path.to_owned()))
    }

    fn class(&self) -> Option<Class> {
        Some(match self {
            Self::Fixed(_) => Class::Fixed,
            Self::Collection { namespace: None, .. } => Class::WideCollection,
            Self::Collection { .. } => Class::NamespacedCollection,
            Self::Object { resource, .. } if resource.definition().namespaced => Class::NamespacedObject,
            Self::Object { .. } => Class::WideObject,
            Self::Unknown(_) => return None,
        })
    }

    fn path_shape(&self) -> String {
        let prefix = |resource: &Resource| match resource.definition().group {
            "" => "/api/v1".to_owned(),
            group => format!("/apis/{group}/{}", resource.definition().version),
        };
        match self {
            Self::Fixed(path) | Self::Unknown(path) => path.clone(),
            Self::Collection { resource, namespace: None } => {
                format!("{}/{}", prefix(resource), resource.definition().plural)
            }
            Self::Collection { resource, .. } => {
                format!("{}/namespaces/{{namespace}}/{}", prefix(resource), resource.definition().plural)
            }
            Self::Object { resource, .. } if resource.definition().namespaced => {
                format!(
                    "{}/namespaces/{{namespace}}/{}/{{name}}",
                    prefix(resource),
                    resource.definition().plural
                )
            }
            Self::Object { resource, .. } => {
                format!("{}/{}/{{name}}", prefix(resource), resource.definition().plural)
            }
        }
    }
}

impl Shape {
    /// The shape of a request; parameters of the content type do not count.
    pub fn new<'a>(
        method: &str,
        route: &Route,
        content_type: &str,
        query_keys: impl Iterator<Item = &'a str>,
    ) -> Self {
        let keys: BTreeSet<&str> = query_keys.collect();
        Self {
            method: method.to_owned(),
            path: route.path_shape(),
            content_type: content_type.split(';').next().unwrap_or_default().trim().to_owned(),
            query_keys: keys.into_iter().map(str::to_owned).collect(),
            class: route.class(),
        }
    }

    /// The row that covers this shape.
    pub fn known(&self) -> Option<&'static Known> {
        KNOWN.iter().find(|known| {
            known.method == self.method
                && Some(known.class) == self.class
                && known.content_type == self.content_type
                && self.query_keys.iter().all(|key| known.query_keys.contains(&key.as_str()))
        })
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.path)?;
        if !self.query_keys.is_empty() {
            write!(f, "?{}", self.query_keys.join("&"))?;
        }
        if !self.content_type.is_empty() {
            write!(f, " ({})", self.content_type)?;
        }
        Ok(())
    }
}

impl Closure {
    pub(super) fn record(&self, shape: Shape) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // A peer that invents paths cannot grow the record without bound.
        if seen.len() < SHAPES_LIMIT || seen.contains_key(&shape) {
            *seen.entry(shape).or_default() += 1;
        }
    }

    /// Every shape so far, and how often it came.
    pub fn shapes(&self) -> BTreeMap<Shape, u64> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The shapes that were answered with 501.
    pub fn unknown(&self) -> Vec<Shape> {
        self.shapes().into_keys().filter(|shape| shape.known().is_none()).collect()
    }
}

const LIST_KEYS: &[&str] = &[
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "labelSelector",
    "limit",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "timeoutSeconds",
    "watch",
];
const WRITE_KEYS: &[&str] = &["fieldManager", "fieldValidation"];

const fn known(
    method: &'static str,
    class: Class,
    content_type: &'static str,
    query_keys: &'static [&'static str],
) -> Known {
    Known { method, class, content_type, query_keys }
}

/// The vocabulary of the embedded API server.
pub const KNOWN: &[Known] = &[
    known("GET", Class::Fixed, "", &["timeout"]),
    known("GET", Class::WideCollection, "", LIST_KEYS),
    known("GET", Class::NamespacedCollection, "", LIST_KEYS),
    known("GET", Class::WideObject, "", &[]),
    known("GET", Class::NamespacedObject, "", &[]),
    known("POST", Class::WideCollection, "application/json", WRITE_KEYS),
    known("POST", Class::NamespacedCollection, "application/json", WRITE_KEYS),
    known("PUT", Class::NamespacedObject, "application/json", WRITE_KEYS),
    known("PATCH", Class::NamespacedObject, "application/json-patch+json", WRITE_KEYS),
    known("PATCH", Class::NamespacedObject, "application/merge-patch+json", WRITE_KEYS),
    known("DELETE", Class::WideObject, "application/json", &[]),
    known("DELETE", Class::NamespacedObject, "", &[]),
    known("DELETE", Class::NamespacedObject, "application/json", &[]),
];

const SHAPES_LIMIT: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(method: &str, path: &str, content_type: &str, keys: &[&str]) -> Shape {
        Shape::new(method, &Route::parse(path), content_type, keys.iter().copied())
    }

    #[test]
    fn names_leave_the_shape() {
        let path = "/apis/argoproj.io/v1alpha1/namespaces/argocd/applications/guestbook";
        let shape = shape("PATCH", path, "application/json-patch+json; charset=utf-8", &["fieldManager"]);
        assert_eq!(
            shape.to_string(),
            "PATCH /apis/argoproj.io/v1alpha1/namespaces/{namespace}/applications/{name}?fieldManager (application/json-patch+json)"
        );
        assert!(shape.known().is_some());
    }

    #[test]
    fn what_is_not_known() {
        let object = "/api/v1/namespaces/argocd/secrets/s";
        assert!(shape("PATCH", object, "application/apply-patch+yaml", &["fieldManager"]).known().is_none());
        assert!(shape("PATCH", object, "application/strategic-merge-patch+json", &[]).known().is_none());
        assert!(shape("GET", object, "", &["pretty"]).known().is_none());
        assert!(shape("GET", &format!("{object}/status"), "", &[]).known().is_none());
        assert!(shape("GET", "/api/v1/namespaces/argocd/pods", "", &[]).known().is_none());
        assert!(shape("DELETE", "/api/v1/namespaces/argocd/secrets", "", &[]).known().is_none());
        assert!(shape("GET", "/api/v1/secrets/s", "", &[]).known().is_none());
        assert!(shape("GET", "/api/v1/namespaces/argocd", "", &[]).known().is_some());
    }
}
