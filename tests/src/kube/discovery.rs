//! Discovery, version and health: enough for `kubectl` and client libraries.

use serde_json::{Value, json};

use super::Resource;

/// The document under a path without names; `None` when there is none.
pub(super) fn document(path: &str) -> Option<Value> {
    let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
    match segments.as_slice() {
        ["version"] => Some(json!({
            "major": "1", "minor": "33", "gitVersion": "v1.33.0-embedded", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": ""
        })),
        ["api"] => Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        ["apis"] => Some(json!({
            "kind": "APIGroupList", "apiVersion": "v1",
            "groups": groups().into_iter().map(|(group, version)| group_document(group, version)).collect::<Vec<_>>()
        })),
        ["apis", name] => groups().into_iter().find(|(group, _)| group == name).map(|(group, version)| {
            let mut document = group_document(group, version);
            document["kind"] = json!("APIGroup");
            document["apiVersion"] = json!("v1");
            document
        }),
        ["api", "v1"] => Some(resource_list("", "v1")),
        ["apis", group, version] if groups().contains(&(*group, *version)) => {
            Some(resource_list(group, version))
        }
        ["openapi", "v3"] => Some(openapi_index()),
        ["openapi", "v3", "api", "v1"] => Some(openapi("", "v1")),
        ["openapi", "v3", "apis", group, version] if groups().contains(&(*group, *version)) => {
            Some(openapi(group, version))
        }
        _ => None,
    }
}

/// The named groups, each with its version.
fn groups() -> Vec<(&'static str, &'static str)> {
    let mut groups = Vec::new();
    for resource in Resource::ALL {
        let definition = resource.definition();
        let group = (definition.group, definition.version);
        if !definition.group.is_empty() && !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups
}

fn group_document(group: &str, version: &str) -> Value {
    let version = json!({"groupVersion": format!("{group}/{version}"), "version": version});
    json!({"name": group, "versions": [version], "preferredVersion": version})
}

fn resources<'a>(group: &'a str, version: &'a str) -> impl Iterator<Item = Resource> + 'a {
    Resource::ALL.into_iter().filter(move |resource| {
        let definition = resource.definition();
        definition.group == group && definition.version == version
    })
}

fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

fn resource_list(group: &str, version: &str) -> Value {
    let resources: Vec<Value> = resources(group, version)
        .map(|resource| {
            let definition = resource.definition();
            json!({
                "name": definition.plural, "singularName": definition.singular, "namespaced": definition.namespaced,
                "kind": definition.kind, "shortNames": definition.short_names,
                "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"]
            })
        })
        .collect();
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version(group, version),
        "resources": resources
    })
}

fn openapi_index() -> Value {
    let mut paths = json!({"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}});
    for (group, version) in groups() {
        let path = format!("apis/{group}/{version}");
        paths[&path] = json!({"serverRelativeURL": format!("/openapi/v3/{path}")});
    }
    json!({"paths": paths})
}

/// No schemas: only that PATCH takes `fieldValidation`, so that clients leave validation to the server.
fn openapi(group: &str, version: &str) -> Value {
    let mut paths = json!({});
    for resource in resources(group, version) {
        let definition = resource.definition();
        let prefix =
            if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") };
        let scope = if definition.namespaced { "/namespaces/{namespace}" } else { "" };
        let path = format!("{prefix}{scope}/{}/{{name}}", definition.plural);
        paths[&path] = json!({"patch": {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": definition.kind}
        }});
    }
    json!({"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "embedded"}, "paths": paths})
}
