//! AppProjects: which agents get one, how it looks there, and how an autonomous agent's looks on the hub.

use alloc::borrow::Cow;
use alloc::string::String;
use alloc::vec::Vec;

use crate::glob;
use crate::json::{self, ObjectWriter};
use crate::peer::Mapping;
use crate::transform::{IN_CLUSTER, Malformed, edit_list, with_texts};

/// Decides regular expressions: (expression, text) → whether it matches; `false` also if it is not understood.
pub type Regex<'r> = &'r dyn Fn(&str, &str) -> bool;

/// Whether a project with this `spec` goes to `agent`.
///
/// A destination matches by name, or where it has no name by `*` as server or by the `agentName` in the server's URL. A name
/// `!pattern` that matches refuses the agent for good, wherever it stands. With namespace mapping the agent's
/// namespace, which is its name, must be among `sourceNamespaces` as well.
pub fn goes_to(spec: &[u8], agent: &str, mapping: Mapping, regex: Regex<'_>) -> Result<bool, Malformed> {
    let mut admitted = false;
    for destination in array_at(spec, "destinations")? {
        let [name, server] = name_and_server(destination)?;
        if name.strip_prefix('!').is_some_and(|denied| glob::matches(denied, agent)) {
            return Ok(false);
        }
        admitted |= names_agent(&name, &server, agent);
    }
    if !admitted || mapping == Mapping::Destination {
        return Ok(admitted);
    }
    let mut namespaces = Vec::new();
    for namespace in array_at(spec, "sourceNamespaces")? {
        namespaces.push(json::string(namespace).ok_or(Malformed)?);
    }
    Ok(glob::list_matches(namespaces.iter().map(AsRef::as_ref), agent, regex))
}

/// Which parts of a project its site does not get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SiteView {
    /// With namespace mapping `sourceNamespaces`, which are the hub's, are left out.
    pub mapping: Mapping,
    /// A managed agent has no users of its own, so that roles are left out.
    pub managed: bool,
}

/// The project as `agent` gets it: its own destinations only, each as `in-cluster`.
pub fn for_agent(project: &[u8], agent: &str, view: SiteView) -> Result<Vec<u8>, Malformed> {
    edit_spec(project, |spec| site_spec(spec, agent, view))
}

pub(crate) fn site_spec(spec: &[u8], agent: &str, view: SiteView) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(spec.len() + 64);
    let mut writer = ObjectWriter::new(&mut out);
    for (key, value) in json::members(spec).map_err(|_| Malformed)? {
        match &*key {
            "destinations" => {
                let list = edit_list(value, |destination, out| {
                    let [name, server] = name_and_server(destination)?;
                    if names_agent(&name, &server, agent) {
                        let texts = [("name", IN_CLUSTER), ("server", IN_CLUSTER_SERVER)];
                        with_texts(out, destination, &texts, &[])?;
                    }
                    Ok(())
                })?;
                if list != b"[]" {
                    writer.raw("destinations", &list);
                }
            }
            "destinationServiceAccounts" => {
                let list = edit_list(value, |entry, out| service_account(entry, agent, out))?;
                if list != b"[]" {
                    writer.raw("destinationServiceAccounts", &list);
                }
            }
            "sourceNamespaces" if view.mapping == Mapping::Namespace => {}
            "roles" if view.managed => {}
            key => writer.raw(key, value),
        }
    }
    writer.end();
    Ok(out)
}

/// An entry whose server names an agent is that agent's only, and `in-cluster` there. One that names no agent holds on every site,
/// as in the reference, which filters none: a project made for it keeps its service accounts.
fn service_account(entry: &[u8], agent: &str, out: &mut Vec<u8>) -> Result<(), Malformed> {
    let server = text_member(entry, "server")?;
    match agent_of_url(&server) {
        None => out.extend_from_slice(entry),
        Some(pattern) if glob::matches(&pattern, agent) => {
            with_texts(out, entry, &[("server", IN_CLUSTER_SERVER)], &[])?;
        }
        Some(_) => {}
    }
    Ok(())
}

fn names_agent(name: &str, server: &str, agent: &str) -> bool {
    if !name.is_empty() {
        glob::matches(name, agent)
    } else if server == "*" {
        true
    } else {
        agent_of_url(server).is_some_and(|pattern| glob::matches(&pattern, agent))
    }
}

fn name_and_server(destination: &[u8]) -> Result<[Cow<'_, str>; 2], Malformed> {
    Ok([text_member(destination, "name")?, text_member(destination, "server")?])
}

/// The query parameter `agentName` of a server's URL, decoded; `None` where there is none, or no URL.
pub fn agent_of_url(server: &str) -> Option<String> {
    if server.bytes().any(|byte| byte.is_ascii_control()) {
        return None;
    }
    let (address, fragment) = server.split_once('#').unwrap_or((server, ""));
    let (address, query) = address.split_once('?')?;
    if !is_address(address) || unescape(fragment, false).is_none() {
        return None;
    }
    // A pair that cannot be read is none.
    let pair = |pair: &str| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (!pair.contains(';')).then_some(())?;
        (unescape(key, true)? == "agentName").then_some(())?;
        unescape(value, true)
    };
    query.split('&').find_map(pair).filter(|pattern| !pattern.is_empty())
}

/// Whether a URL may begin like this: a scheme or none, a host without spaces, a numeric port, whole escapes.
fn is_address(address: &str) -> bool {
    let rest = match address.split_once(':') {
        Some((scheme, rest)) if is_scheme(scheme) => rest,
        // A colon in the first segment, without a scheme.
        Some((segment, _)) if !segment.contains('/') => return false,
        _ => address,
    };
    let Some(rest) = rest.strip_prefix("//") else {
        return unescape(rest, false).is_some();
    };
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let after_brackets = match host.strip_prefix('[') {
        None => host,
        Some(inside) => match inside.split_once(']') {
            Some((_, after)) => after,
            None => return false,
        },
    };
    let port = after_brackets.rsplit_once(':').map_or("", |(_, port)| port);
    let forbidden = |byte: u8| {
        matches!(byte, b' ' | b'"' | b'<' | b'>' | b'%' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}')
    };
    port.bytes().all(|byte| byte.is_ascii_digit())
        && !after_brackets.bytes().any(forbidden)
        && unescape(path, false).is_some()
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// Percent-decoding; `None` for an escape that is none. A `+` is a space in a query.
fn unescape(text: &str, query: bool) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                let value = digit()? << 4 | digit()?;
                out.push(u8::try_from(value).ok()?);
            }
            b'+' if query => out.push(b' '),
            byte => out.push(byte),
        }
    }
    Some(String::from_utf8_lossy(&out).into_owned())
}

/// The name that an autonomous agent's project has on the hub; `None` if that would be too long for a name.
pub fn hub_name(agent: &str, project: &str) -> Option<String> {
    let name = alloc::format!("{agent}-{project}");
    (name.len() <= NAME_LIMIT).then_some(name)
}

/// An autonomous agent's project as it stands on the hub, in `namespace`.
///
/// Its Applications come from the agent's namespace and go to the agent, whatever they were called on the site; owners
/// of the site mean nothing on the hub.
pub fn on_hub(project: &[u8], agent: &str, namespace: &str) -> Result<Vec<u8>, Malformed> {
    let metadata = json::member(project, "metadata").map_err(|_| Malformed)?.ok_or(Malformed)?;
    let name = text_member(metadata, "name")?;
    let hub_name = hub_name(agent, &name).ok_or(Malformed)?;
    let mut new_metadata = Vec::with_capacity(metadata.len() + agent.len() + 1);
    let texts = [("name", &*hub_name), ("namespace", namespace)];
    with_texts(&mut new_metadata, metadata, &texts, &["ownerReferences"])?;
    let project = json::set_member(project, "metadata", &new_metadata).map_err(|_| Malformed)?;
    edit_spec(&project, |spec| hub_spec(spec, agent, &name, &hub_name))
}

fn hub_spec(spec: &[u8], agent: &str, name: &str, hub_name: &str) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(spec.len() + 64);
    let mut writer = ObjectWriter::new(&mut out);
    for (key, value) in json::members(spec).map_err(|_| Malformed)? {
        match &*key {
            "destinations" => {
                let list = edit_list(value, |destination, out| {
                    with_texts(out, destination, &[("name", agent), ("server", "*")], &[])
                })?;
                writer.raw("destinations", &list);
            }
            "roles" => {
                let list = edit_list(value, |role, out| hub_role(role, agent, name, hub_name, out))?;
                writer.raw("roles", &list);
            }
            "sourceNamespaces" => {}
            key => writer.raw(key, value),
        }
    }
    let namespaces = writer.key("sourceNamespaces");
    namespaces.push(b'[');
    json::push_string(namespaces, agent);
    namespaces.push(b']');
    writer.end();
    Ok(out)
}

fn hub_role(
    role: &[u8],
    agent: &str,
    project: &str,
    hub_project: &str,
    out: &mut Vec<u8>,
) -> Result<(), Malformed> {
    let role_name = text_member(role, "name")?;
    let mut writer = ObjectWriter::new(out);
    for (key, value) in json::members(role).map_err(|_| Malformed)? {
        if key == "policies" {
            let list = edit_list(value, |line, out| {
                let line = json::string(line).ok_or(Malformed)?;
                json::push_string(out, &policy(&line, project, hub_project, &role_name, agent));
                Ok(())
            })?;
            writer.raw("policies", &list);
        } else {
            writer.raw(&key, value);
        }
    }
    writer.end();
    Ok(())
}

/// One policy of a role of an autonomous agent's project, as it must read on the hub.
///
/// Rewritten are policies on Applications, their sets, logs and terminals, of this project and role: the project gets its name on
/// the hub, and `<project>/<application>` the agent's namespace in between. Anything else stays as it is.
pub fn policy<'l>(line: &'l str, project: &str, hub_project: &str, role: &str, agent: &str) -> Cow<'l, str> {
    let fields: Vec<&str> = line.split(',').collect();
    let [kind, subject, resource, action, object, effect] = fields[..] else { return Cow::Borrowed(line) };
    if kind.trim() != "p" || !matches!(resource.trim(), "applications" | "applicationsets" | "logs" | "exec")
    {
        return Cow::Borrowed(line);
    }
    let parts: Vec<&str> = subject.trim().split(':').collect();
    let hub_subject = match parts[..] {
        ["proj", of_project, of_role] if of_project == project && of_role == role => {
            let leading = &subject[..subject.len() - subject.trim_start().len()];
            let trailing = &subject[subject.trim_end().len()..];
            Cow::Owned(alloc::format!("{leading}proj:{hub_project}:{role}{trailing}"))
        }
        ["proj", _, _] => return Cow::Borrowed(line),
        ["proj", _, ..] => Cow::Borrowed(subject),
        _ => return Cow::Borrowed(line),
    };
    let parts: Vec<&str> = object.trim().split('/').collect();
    let hub_object = match parts[..] {
        [of_project, application] if of_project == project => {
            Cow::Owned(alloc::format!(" {hub_project}/{agent}/{application}"))
        }
        // A policy about another project's Applications.
        [_, _] => return Cow::Borrowed(line),
        _ => Cow::Borrowed(object),
    };
    Cow::Owned([kind, &hub_subject, resource, action, &hub_object, effect].join(","))
}

/// The items of a list in `object`; absent is empty.
fn array_at<'a>(object: &'a [u8], key: &str) -> Result<Vec<&'a [u8]>, Malformed> {
    match json::member(object, key).map_err(|_| Malformed)? {
        Some(list) => json::items(list).map_err(|_| Malformed),
        None => Ok(Vec::new()),
    }
}

/// A text member; absent is empty.
fn text_member<'a>(object: &'a [u8], key: &str) -> Result<Cow<'a, str>, Malformed> {
    match json::member(object, key).map_err(|_| Malformed)? {
        Some(value) => json::string(value).ok_or(Malformed),
        None => Ok(Cow::Borrowed("")),
    }
}

fn edit_spec(
    object: &[u8],
    edit: impl FnOnce(&[u8]) -> Result<Vec<u8>, Malformed>,
) -> Result<Vec<u8>, Malformed> {
    match json::member(object, "spec").map_err(|_| Malformed)? {
        Some(spec) => json::set_member(object, "spec", &edit(spec)?).map_err(|_| Malformed),
        None => Ok(object.to_vec()),
    }
}

/// The server of the cluster that Argo CD on a site runs in.
const IN_CLUSTER_SERVER: &str = "https://kubernetes.default.svc";
/// Longest name of an object.
const NAME_LIMIT: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routing() {
        for (spec, agent, namespace, destination) in [
            (r#"{"destinations":[{"name":"a-*"}],"sourceNamespaces":["*"]}"#, "a-1", true, true),
            (r#"{"destinations":[{"name":"a-*"}],"sourceNamespaces":["b"]}"#, "a-1", false, true),
            (r#"{"destinations":[{"name":"a-*"}]}"#, "a-1", false, true),
            (
                r#"{"destinations":[{"name":"*"},{"name":"!a-*"}],"sourceNamespaces":["*"]}"#,
                "a-1",
                false,
                false,
            ),
            (r#"{"destinations":[{"name":"!b"}],"sourceNamespaces":["*"]}"#, "a", false, false),
            (r#"{"destinations":[{"name":"!b"}],"sourceNamespaces":["*"]}"#, "!b", true, true),
            (r#"{"destinations":[{"server":"*"}],"sourceNamespaces":["/^a$/"]}"#, "a", true, true),
            (r#"{"destinations":[{"server":"*","name":"b"}],"sourceNamespaces":["*"]}"#, "a", false, false),
            (
                r#"{"destinations":[{"server":"https://rp?agentName=a*"}],"sourceNamespaces":["*"]}"#,
                "ab",
                true,
                true,
            ),
            (r#"{"destinations":null,"sourceNamespaces":["*"]}"#, "a", false, false),
            ("{}", "a", false, false),
        ] {
            let regex = |expression: &str, text: &str| expression.trim_matches(['^', '$']) == text;
            assert_eq!(goes_to(spec.as_bytes(), agent, Mapping::Namespace, &regex), Ok(namespace), "{spec}");
            assert_eq!(
                goes_to(spec.as_bytes(), agent, Mapping::Destination, &regex),
                Ok(destination),
                "{spec}"
            );
        }
        let regex = |_: &str, _: &str| false;
        for spec in [r#"{"destinations":[1]}"#, r#"{"destinations":{}}"#, "[]"] {
            assert_eq!(goes_to(spec.as_bytes(), "a", Mapping::Namespace, &regex), Err(Malformed), "{spec}");
        }
    }

    #[test]
    fn agents_of_urls() {
        for (url, agent) in [
            ("https://rp:9090?agentName=a", Some("a")),
            ("https://rp:9090/?x=y&agentName=a-*", Some("a-*")),
            ("https://rp?agentName=a%2Ab+c", Some("a*b c")),
            ("https://rp?agentName=a&agentName=b", Some("a")),
            ("https://rp?agentName=%zz&agentName=b", Some("b")),
            ("https://rp?agentName=a;b=c", None),
            ("https://rp?agentname=a", None),
            ("https://rp#?agentName=a", None),
            ("https://rp?agentName=a#f", Some("a")),
            ("https://[::1]:9090?agentName=a", Some("a")),
            ("rp?agentName=a", Some("a")),
            ("rp:9090?agentName=a", Some("a")),
            ("1rp:9090?agentName=a", None),
            ("https://rp:x?agentName=a", None),
            ("https://r p?agentName=a", None),
            ("https://rp/%zz?agentName=a", None),
            ("https://rp?agentName=a\n", None),
            ("https://rp?agentName=", None),
            ("https://kubernetes.default.svc", None),
        ] {
            assert_eq!(agent_of_url(url).as_deref(), agent, "{url}");
        }
    }

    #[test]
    fn what_a_site_gets() {
        let project = br#"{"metadata":{"name":"p","uid":"u"},"spec":{"sourceNamespaces":["a"],
            "destinations":[{"name":"a","namespace":"x"},{"name":"b"},{"server":"*","namespace":"y","new":1},{"name":"!c"}],
            "destinationServiceAccounts":[{"server":"https://kubernetes.default.svc","namespace":"*","defaultServiceAccount":"s"},
                {"server":"https://rp?agentName=a","defaultServiceAccount":"of-a"},{"server":"https://rp?agentName=b","defaultServiceAccount":"of-b"}],
            "roles":[{"name":"r"}],"description":"d"},"status":{}}"#;
        let ours = for_agent(project, "a", SiteView { mapping: Mapping::Namespace, managed: true });
        let expected = br#"{"metadata":{"name":"p","uid":"u"},"spec":{
            "destinations":[{"name":"in-cluster","server":"https://kubernetes.default.svc","namespace":"x"},
                {"name":"in-cluster","server":"https://kubernetes.default.svc","namespace":"y","new":1}],
            "destinationServiceAccounts":[{"server":"https://kubernetes.default.svc","namespace":"*","defaultServiceAccount":"s"},
                {"server":"https://kubernetes.default.svc","defaultServiceAccount":"of-a"}],
            "description":"d"},"status":{}}"#;
        let ours = ours.unwrap();
        assert!(json::same(&ours, expected), "{}", String::from_utf8_lossy(&ours));
        let ours =
            for_agent(project, "z", SiteView { mapping: Mapping::Destination, managed: false }).unwrap();
        let spec = json::member(&ours, "spec").unwrap().unwrap();
        assert_eq!(array_at(spec, "destinations").unwrap().len(), 1);
        assert_eq!(array_at(spec, "roles").unwrap().len(), 1);
        assert_eq!(array_at(spec, "sourceNamespaces").unwrap().len(), 1);
    }

    #[test]
    fn an_autonomous_project_on_the_hub() {
        let project = br#"{"metadata":{"name":"p","namespace":"argocd","uid":"u","ownerReferences":[{}],"labels":{"l":"1"}},
            "spec":{"destinations":[{"server":"https://kubernetes.default.svc","namespace":"n"}],"sourceNamespaces":["x"],
            "roles":[{"name":"ro","policies":["p, proj:p:ro, applications, get, p/*, allow","x"]}]}}"#;
        let expected = br#"{"metadata":{"name":"a-p","namespace":"hub","uid":"u","labels":{"l":"1"}},
            "spec":{"destinations":[{"name":"a","server":"*","namespace":"n"}],"sourceNamespaces":["a"],
            "roles":[{"name":"ro","policies":["p, proj:a-p:ro, applications, get, a-p/a/*, allow","x"]}]}}"#;
        let ours = on_hub(project, "a", "hub").unwrap();
        assert!(json::same(&ours, expected), "{}", String::from_utf8_lossy(&ours));
        assert_eq!(hub_name("a", &"p".repeat(251)).map(|name| name.len()), Some(253));
        assert_eq!(hub_name("a", &"p".repeat(252)), None);
    }

    #[test]
    fn policies() {
        for (line, expected) in [
            ("p,proj:p:r ,applications,get,p/*,allow", "p,proj:a-p:r ,applications,get, a-p/a/*,allow"),
            ("p, proj:p:r, logs, get, p/n/x, allow", "p, proj:a-p:r, logs, get, p/n/x, allow"),
            ("p, proj:p, exec, create, p/x, allow", "p, proj:p, exec, create, a-p/a/x, allow"),
            ("p, proj:p:r, repositories, get, p/*, allow", "p, proj:p:r, repositories, get, p/*, allow"),
            (
                "p, proj:p:other, applications, get, p/*, allow",
                "p, proj:p:other, applications, get, p/*, allow",
            ),
            ("p, proj:p:r, applications, get, q/*, allow", "p, proj:p:r, applications, get, q/*, allow"),
            ("g, proj:p:r, applications, get, p/*, allow", "g, proj:p:r, applications, get, p/*, allow"),
            ("", ""),
        ] {
            assert_eq!(policy(line, "p", "a-p", "r", "a"), expected, "{line}");
        }
    }
}
