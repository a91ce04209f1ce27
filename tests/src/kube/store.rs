//! The semantics of an API server, without I/O: an ordered map, a revision counter and a ring of recent events.
//!
//! Deterministic: the clock and the UIDs come from the caller's time and seed, and members are sorted by name.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use agent_core::rand::Rng;
use agent_core::request::is_dns_subdomain;
use agent_core::time::{Instant, Wall};
use serde_json::{Map, Value, json};

use super::selector::Selector;
use super::{Resource, Status, jsonpatch};

/// One stored state of an object.
#[derive(Debug)]
pub struct Object {
    value: Value,
    json: Vec<u8>,
}

impl Object {
    fn new(value: Value) -> Arc<Self> {
        // A value always has a text: its keys are strings.
        let json = serde_json::to_vec(&value).unwrap_or_default();
        Arc::new(Self { value, json })
    }

    /// The object as the API server sends it.
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    pub fn value(&self) -> &Value {
        &self.value
    }

    fn metadata(&self, member: &str) -> &str {
        self.value["metadata"][member].as_str().unwrap_or_default()
    }

    pub fn name(&self) -> &str {
        self.metadata("name")
    }

    pub fn namespace(&self) -> &str {
        self.metadata("namespace")
    }

    pub fn uid(&self) -> &str {
        self.metadata("uid")
    }

    pub fn resource_version(&self) -> &str {
        self.metadata("resourceVersion")
    }

    pub fn is_terminating(&self) -> bool {
        !self.metadata("deletionTimestamp").is_empty()
    }

    fn has_finalizers(&self) -> bool {
        has_finalizers(&self.value)
    }

    fn with_resource_version(&self, revision: u64) -> Arc<Self> {
        let mut value = self.value.clone();
        value["metadata"]["resourceVersion"] = json!(revision.to_string());
        Self::new(value)
    }
}

/// Names an object.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ObjectKey {
    pub resource: Resource,
    pub namespace: String,
    pub name: String,
}

/// How a list is narrowed and paged.
#[derive(Clone, Debug, Default)]
pub struct ListOptions {
    pub selector: Selector,
    /// 0: everything.
    pub limit: usize,
    pub r#continue: String,
    pub resource_version: String,
    /// `resourceVersionMatch=Exact`.
    pub exact: bool,
}

/// One page of a list.
#[derive(Debug)]
pub struct List {
    pub items: Vec<Arc<Object>>,
    pub revision: u64,
    /// Empty on the last page.
    pub r#continue: String,
    pub remaining: Option<usize>,
}

impl List {
    /// The answer: one page as JSON.
    pub fn body(&self, resource: Resource) -> Vec<u8> {
        let mut metadata = json!({"resourceVersion": self.revision.to_string()});
        if !self.r#continue.is_empty() {
            metadata["continue"] = json!(self.r#continue);
        }
        if let Some(remaining) = self.remaining {
            metadata["remainingItemCount"] = json!(remaining);
        }
        let kind = format!("{}List", resource.definition().kind);
        let head =
            json!({"apiVersion": resource.api_version(), "kind": kind, "metadata": metadata}).to_string();
        let size = head.len() + self.items.iter().map(|item| item.json().len() + 1).sum::<usize>();
        let mut body = Vec::with_capacity(size + 16);
        // The items are spliced in as they are stored.
        body.extend_from_slice(&head.as_bytes()[..head.len() - 1]);
        body.extend_from_slice(b",\"items\":[");
        for (index, item) in self.items.iter().enumerate() {
            if index > 0 {
                body.push(b',');
            }
            body.extend_from_slice(item.json());
        }
        body.extend_from_slice(b"]}");
        body
    }
}

/// Where a watch starts and what it carries.
#[derive(Clone, Debug, Default)]
pub struct WatchOptions {
    pub selector: Selector,
    pub resource_version: String,
    pub bookmarks: bool,
    /// `sendInitialEvents=true`: the present state first, then a bookmark that says so.
    pub initial_events: bool,
}

/// A watch: a cursor in the history.
#[derive(Debug)]
pub struct Watch {
    resource: Resource,
    namespace: Option<String>,
    selector: Selector,
    bookmarks: bool,
    after: u64,
    initial: VecDeque<WatchEvent>,
    ended: bool,
}

impl Watch {
    /// Whether an error event ended it.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether it has seen all of `store`.
    pub fn is_current(&self, store: &Store) -> bool {
        self.ended || (self.initial.is_empty() && self.after == store.revision)
    }
}

/// `type` of a watch event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WatchType {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

impl WatchType {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
            Self::Bookmark => "BOOKMARK",
            Self::Error => "ERROR",
        }
    }
}

/// One event of a watch.
#[derive(Clone, Debug)]
pub struct WatchEvent {
    pub r#type: WatchType,
    pub object: Arc<Object>,
}

impl WatchEvent {
    /// The line that the API server sends, newline included.
    pub fn line(&self) -> Vec<u8> {
        let mut line = Vec::with_capacity(self.object.json.len() + 40);
        line.extend_from_slice(b"{\"type\":\"");
        line.extend_from_slice(self.r#type.as_str().as_bytes());
        line.extend_from_slice(b"\",\"object\":");
        line.extend_from_slice(&self.object.json);
        line.extend_from_slice(b"}\n");
        line
    }
}

/// The patch formats (server-side apply is not among them).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PatchType {
    Json,
    Merge,
}

/// `preconditions` of a DELETE.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preconditions {
    pub uid: Option<String>,
    pub resource_version: Option<String>,
}

/// How a DELETE ended.
#[derive(Clone, Debug)]
pub enum Deleted {
    /// It is gone; this was its last state.
    Removed(Arc<Object>),
    /// Finalizers hold it; it has a deletionTimestamp now.
    Terminating(Arc<Object>),
}

impl Deleted {
    /// Body of the answer.
    pub fn body(&self, resource: Resource) -> Vec<u8> {
        match self {
            Self::Terminating(object) => object.json.clone(),
            Self::Removed(object) => {
                let definition = resource.definition();
                let mut details =
                    json!({"name": object.name(), "kind": definition.plural, "uid": object.uid()});
                if !definition.group.is_empty() {
                    details["group"] = json!(definition.group);
                }
                json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
                    .to_string()
                    .into_bytes()
            }
        }
    }
}

#[derive(Debug)]
struct Change {
    revision: u64,
    key: ObjectKey,
    previous: Option<Arc<Object>>,
    /// After a delete: the last state under the delete's own resourceVersion.
    object: Arc<Object>,
    deleted: bool,
}

/// Objects, and the recent changes that led to them.
#[derive(Debug)]
pub struct Store {
    objects: BTreeMap<ObjectKey, Arc<Object>>,
    history: VecDeque<Change>,
    history_limit: usize,
    revision: u64,
    /// Changes up to this revision are forgotten.
    compacted: u64,
    rng: Rng,
    wall: Wall,
    now: Instant,
}

impl Store {
    /// An empty store; UIDs follow from `seed`.
    pub fn new(seed: u64, wall: Wall) -> Self {
        Self {
            objects: BTreeMap::new(),
            history: VecDeque::new(),
            history_limit: HISTORY_LIMIT,
            revision: 1,
            compacted: 0,
            rng: Rng::new(seed),
            wall,
            now: Instant::ZERO,
        }
    }

    /// What timestamps are made from.
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// `resourceVersion` of the whole store.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Forgets the history: lists are unaffected, watches and pages from before answer 410.
    pub fn compact(&mut self) {
        self.history.clear();
        self.compacted = self.revision;
    }

    pub fn get(&self, resource: Resource, namespace: &str, name: &str) -> Result<Arc<Object>, Status> {
        self.objects
            .get(&key(resource, namespace, name))
            .cloned()
            .ok_or_else(|| Status::not_found(resource, name))
    }

    /// All objects of `resource`, in order.
    pub fn iter(&self, resource: Resource) -> impl Iterator<Item = &Arc<Object>> {
        self.range(resource, None).map(|(_, object)| object)
    }

    pub fn list(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        options: &ListOptions,
    ) -> Result<List, Status> {
        let (revision, start) = self.list_position(options)?;
        let mut snapshot: BTreeMap<&ObjectKey, &Arc<Object>> = self.range(resource, namespace).collect();
        if revision < self.compacted {
            return Err(Status::expired(revision, self.compacted));
        }
        for change in self.history.iter().rev().take_while(|change| change.revision > revision) {
            if in_scope(&change.key, resource, namespace) {
                match &change.previous {
                    Some(previous) => snapshot.insert(&change.key, previous),
                    None => snapshot.remove(&change.key),
                };
            }
        }
        let limit = if options.limit == 0 { usize::MAX } else { options.limit };
        let mut candidates = snapshot
            .into_iter()
            .filter(|(key, _)| {
                start.as_ref().is_none_or(|(namespace, name)| {
                    (key.namespace.as_str(), key.name.as_str()) > (namespace.as_str(), name.as_str())
                })
            })
            .filter(|(_, object)| options.selector.matches(&object.value));
        let mut items = Vec::new();
        let mut last = None;
        for (key, object) in candidates.by_ref().take(limit) {
            items.push(object.clone());
            last = Some(key);
        }
        let remaining = candidates.count();
        let r#continue = match last {
            // Names hold dots, namespaces do not: the token splits unambiguously.
            Some(key) if remaining > 0 => format!("{revision}.{}.{}", key.namespace, key.name),
            _ => String::new(),
        };
        // The API server does not count what a selector would drop.
        let remaining = (remaining > 0 && options.selector.is_everything()).then_some(remaining);
        Ok(List { items, revision, r#continue, remaining })
    }

    pub fn create(
        &mut self,
        resource: Resource,
        namespace: &str,
        object: Value,
    ) -> Result<Arc<Object>, Status> {
        let mut object = checked_object(resource, object)?;
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() {
            return Err(Status::invalid(resource, "", "metadata.name: Required value: name is required"));
        }
        if !is_dns_subdomain(&name) {
            let why = format!(
                "metadata.name: Invalid value: {name:?}: a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
            );
            return Err(Status::invalid(resource, &name, &why));
        }
        let metadata = metadata_mut(&mut object);
        check_namespace(resource, metadata, namespace)?;
        if metadata.get("resourceVersion").and_then(Value::as_str).is_some_and(|version| !version.is_empty())
        {
            return Err(Status::new(500, "", "resourceVersion should not be set on objects to be created"));
        }
        let key = key(resource, namespace, &name);
        if self.objects.contains_key(&key) {
            return Err(Status::already_exists(resource, &name));
        }
        for server_owned in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"] {
            metadata.remove(server_owned);
        }
        metadata.insert("uid".to_owned(), json!(self.rng.uuid()));
        metadata.insert("creationTimestamp".to_owned(), json!(self.timestamp()));
        if resource.definition().custom {
            metadata.insert("generation".to_owned(), json!(1));
        }
        Ok(self.write(key, object))
    }

    /// PUT.
    pub fn update(
        &mut self,
        resource: Resource,
        namespace: &str,
        name: &str,
        object: Value,
    ) -> Result<Arc<Object>, Status> {
        let current = self.get(resource, namespace, name)?;
        let object = checked_object(resource, object)?;
        if let Some(uid) =
            object["metadata"]["uid"].as_str().filter(|uid| !uid.is_empty() && *uid != current.uid())
        {
            return Err(uid_conflict(resource, name, uid, current.uid()));
        }
        self.replace(resource, current, object)
    }

    pub fn patch(
        &mut self,
        resource: Resource,
        namespace: &str,
        name: &str,
        r#type: PatchType,
        patch: &[u8],
    ) -> Result<Arc<Object>, Status> {
        // What is not there is told before what cannot be read.
        self.get(resource, namespace, name)?;
        let patch: Value = serde_json::from_slice(patch)
            .map_err(|error| Status::bad_request(format!("error decoding patch: {error}")))?;
        self.patch_value(resource, namespace, name, r#type, &patch)
    }

    /// [`Self::patch`] with a patch that is parsed already.
    pub fn patch_value(
        &mut self,
        resource: Resource,
        namespace: &str,
        name: &str,
        r#type: PatchType,
        patch: &Value,
    ) -> Result<Arc<Object>, Status> {
        let current = self.get(resource, namespace, name)?;
        let patched = match r#type {
            PatchType::Json => jsonpatch::apply(&current.value, patch).map_err(|error| match error {
                jsonpatch::PatchError::Malformed(why) => Status::bad_request(why),
                jsonpatch::PatchError::NotApplicable(why) => Status::new(
                    422,
                    "Invalid",
                    format!("the server rejected our request due to an error in our request: {why}"),
                ),
            })?,
            PatchType::Merge => {
                if !patch.is_object() {
                    return Err(Status::invalid(
                        resource,
                        "",
                        "patch: Invalid value: couldn't get version/kind",
                    ));
                }
                let mut patched = current.value.clone();
                jsonpatch::merge(&mut patched, patch);
                patched
            }
        };
        let patched = checked_object(resource, patched)?;
        self.replace(resource, current, patched)
    }

    pub fn delete(
        &mut self,
        resource: Resource,
        namespace: &str,
        name: &str,
        preconditions: &Preconditions,
    ) -> Result<Deleted, Status> {
        let current = self.get(resource, namespace, name)?;
        if let Some(uid) = preconditions.uid.as_deref().filter(|uid| *uid != current.uid()) {
            return Err(uid_conflict(resource, name, uid, current.uid()));
        }
        if let Some(version) =
            preconditions.resource_version.as_deref().filter(|version| *version != current.resource_version())
        {
            let why = format!(
                "the ResourceVersion in the precondition ({version}) does not match the ResourceVersion in record ({}). The object might have been modified",
                current.resource_version()
            );
            return Err(Status::conflict(resource, name, &why));
        }
        let key = key(resource, namespace, name);
        if !current.has_finalizers() {
            return Ok(Deleted::Removed(self.remove(&key, current)));
        }
        if current.is_terminating() {
            return Ok(Deleted::Terminating(current));
        }
        let mut object = current.value.clone();
        let metadata = metadata_mut(&mut object);
        metadata.insert("deletionTimestamp".to_owned(), json!(self.timestamp()));
        metadata.insert("deletionGracePeriodSeconds".to_owned(), json!(0));
        raise_generation(metadata);
        Ok(Deleted::Terminating(self.write(key, object)))
    }

    /// Opens a watch. A history that is too old is told by the first event, as the API server does.
    pub fn watch(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        options: &WatchOptions,
    ) -> Result<Watch, Status> {
        let from = parse_revision(&options.resource_version)?;
        if from > self.revision {
            return Err(Status::too_large_resource_version(from, self.revision));
        }
        let mut initial = VecDeque::new();
        let mut after = from;
        if options.initial_events || from == 0 {
            after = self.revision;
            initial.extend(
                self.range(resource, namespace)
                    .filter(|(_, object)| options.selector.matches(&object.value))
                    .map(|(_, object)| WatchEvent { r#type: WatchType::Added, object: object.clone() }),
            );
            if options.initial_events {
                initial.push_back(bookmark(resource, self.revision, true));
            }
        }
        Ok(Watch {
            resource,
            namespace: namespace.map(str::to_owned),
            selector: options.selector.clone(),
            bookmarks: options.bookmarks,
            after,
            initial,
            ended: false,
        })
    }

    /// The next event of `watch`; `None` when there is nothing new, and for ever after an error event.
    pub fn next_event(&self, watch: &mut Watch) -> Option<WatchEvent> {
        if watch.ended {
            return None;
        }
        if let Some(event) = watch.initial.pop_front() {
            return Some(event);
        }
        if watch.after < self.compacted {
            watch.ended = true;
            let status = Status::expired(watch.after, self.compacted);
            return Some(WatchEvent { r#type: WatchType::Error, object: Object::new(status.to_value()) });
        }
        let first = self.history.partition_point(|change| change.revision <= watch.after);
        for change in self.history.range(first..) {
            watch.after = change.revision;
            if !in_scope(&change.key, watch.resource, watch.namespace.as_deref()) {
                continue;
            }
            let before =
                change.previous.as_ref().filter(|previous| watch.selector.matches(&previous.value)).is_some();
            let after = !change.deleted && watch.selector.matches(&change.object.value);
            let (r#type, object) = match (before, after) {
                (false, true) => (WatchType::Added, change.object.clone()),
                (true, true) => (WatchType::Modified, change.object.clone()),
                (true, false) if change.deleted => (WatchType::Deleted, change.object.clone()),
                // It left the selection: the watcher sees its last selected state under the new version.
                (true, false) => {
                    let previous = change.previous.as_ref()?;
                    (WatchType::Deleted, previous.with_resource_version(change.revision))
                }
                (false, false) => continue,
            };
            return Some(WatchEvent { r#type, object });
        }
        None
    }

    /// A bookmark at the watch's position, if the watcher asked for them and has seen everything.
    pub fn bookmark(&self, watch: &Watch) -> Option<WatchEvent> {
        let up_to_date = watch.after == self.revision && watch.initial.is_empty() && !watch.ended;
        (watch.bookmarks && up_to_date).then(|| bookmark(watch.resource, watch.after, false))
    }

    fn list_position(&self, options: &ListOptions) -> Result<(u64, Option<(String, String)>), Status> {
        if options.r#continue.is_empty() {
            let asked = parse_revision(&options.resource_version)?;
            if asked > self.revision {
                return Err(Status::too_large_resource_version(asked, self.revision));
            }
            return Ok((if options.exact { asked } else { self.revision }, None));
        }
        let parse = || {
            let (revision, rest) = options.r#continue.split_once('.')?;
            let (namespace, name) = rest.split_once('.')?;
            Some((revision.parse().ok()?, (namespace.to_owned(), name.to_owned())))
        };
        let (revision, start) = parse().ok_or_else(|| Status::bad_request("continue key is not valid"))?;
        if revision > self.revision {
            return Err(Status::bad_request("continue key is not valid"));
        }
        Ok((revision, Some(start)))
    }

    fn range(
        &self,
        resource: Resource,
        namespace: Option<&str>,
    ) -> impl Iterator<Item = (&ObjectKey, &Arc<Object>)> {
        let first = key(resource, namespace.unwrap_or_default(), "");
        self.objects
            .range((Bound::Included(first), Bound::Unbounded))
            .take_while(move |(key, _)| in_scope(key, resource, namespace))
    }

    /// The rules that PUT and PATCH share.
    fn replace(
        &mut self,
        resource: Resource,
        current: Arc<Object>,
        mut object: Value,
    ) -> Result<Arc<Object>, Status> {
        let name = current.name().to_owned();
        let namespace = current.namespace().to_owned();
        let metadata = metadata_mut(&mut object);
        match metadata.get("name").and_then(Value::as_str) {
            Some(given) if given == name => {}
            given => {
                let given = given.unwrap_or_default();
                return Err(Status::bad_request(format!(
                    "the name of the object ({given}) does not match the name on the URL ({name})"
                )));
            }
        }
        check_namespace(resource, metadata, &namespace)?;
        match metadata.get("resourceVersion").and_then(Value::as_str).filter(|version| !version.is_empty()) {
            None if resource.definition().custom => {
                let why = "metadata.resourceVersion: Invalid value: 0: must be specified for an update";
                return Err(Status::invalid(resource, &name, why));
            }
            Some(version) if version != current.resource_version() => {
                let why = "the object has been modified; please apply your changes to the latest version and try again";
                return Err(Status::conflict(resource, &name, why));
            }
            _ => {}
        }
        for immutable in ["uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"] {
            let before = current.value["metadata"].get(immutable);
            match (metadata.get(immutable).filter(|value| !value.is_null()), before) {
                (None, Some(before)) => {
                    metadata.insert(immutable.to_owned(), before.clone());
                }
                (Some(given), before) if before != Some(given) => {
                    let why = format!("metadata.{immutable}: Invalid value: {given}: field is immutable");
                    return Err(Status::invalid(resource, &name, &why));
                }
                _ => {}
            }
        }
        let finalizers = |value: &Value| -> Vec<Value> {
            value["metadata"]["finalizers"].as_array().cloned().unwrap_or_default()
        };
        if current.is_terminating() {
            let before = finalizers(&current.value);
            if finalizers(&object).iter().any(|finalizer| !before.contains(finalizer)) {
                let why = "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted";
                return Err(Status::invalid(resource, &name, why));
            }
        }
        let metadata = metadata_mut(&mut object);
        metadata.insert("resourceVersion".to_owned(), json!(current.resource_version()));
        metadata.remove("generation");
        if let Some(generation) = current.value["metadata"].get("generation") {
            metadata.insert("generation".to_owned(), generation.clone());
        }
        if object == current.value {
            return Ok(current);
        }
        if resource.definition().custom && differs_outside_metadata(&object, &current.value) {
            raise_generation(metadata_mut(&mut object));
        }
        let key = key(resource, &namespace, &name);
        if current.is_terminating() && !has_finalizers(&object) {
            // The answer is the object as asked for; the event carries the last stored state.
            self.remove(&key, current);
            return Ok(Object::new(object));
        }
        Ok(self.write(key, object))
    }

    fn write(&mut self, key: ObjectKey, mut value: Value) -> Arc<Object> {
        self.revision += 1;
        value["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let object = Object::new(value);
        let previous = self.objects.insert(key.clone(), object.clone());
        self.record(Change {
            revision: self.revision,
            key,
            previous,
            object: object.clone(),
            deleted: false,
        });
        object
    }

    fn remove(&mut self, key: &ObjectKey, last: Arc<Object>) -> Arc<Object> {
        self.revision += 1;
        self.objects.remove(key);
        let object = last.with_resource_version(self.revision);
        self.record(Change {
            revision: self.revision,
            key: key.clone(),
            previous: Some(last),
            object: object.clone(),
            deleted: true,
        });
        object
    }

    fn record(&mut self, change: Change) {
        self.history.push_back(change);
        if self.history.len() > self.history_limit
            && let Some(oldest) = self.history.pop_front()
        {
            self.compacted = oldest.revision;
        }
    }

    fn timestamp(&self) -> String {
        let millis = self.now.as_millis();
        // Kubernetes times have whole seconds.
        let fraction = (self.wall.epoch_millis_at_zero + millis) % 1000;
        self.wall.rfc3339(Instant::from_millis(millis.saturating_sub(fraction)))
    }
}

fn key(resource: Resource, namespace: &str, name: &str) -> ObjectKey {
    ObjectKey { resource, namespace: namespace.to_owned(), name: name.to_owned() }
}

fn in_scope(key: &ObjectKey, resource: Resource, namespace: Option<&str>) -> bool {
    key.resource == resource && namespace.is_none_or(|namespace| key.namespace == namespace)
}

fn parse_revision(text: &str) -> Result<u64, Status> {
    if text.is_empty() {
        return Ok(0);
    }
    text.parse().map_err(|_| {
        Status::bad_request(format!(
            "resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: invalid syntax"
        ))
    })
}

/// Checks `apiVersion`, `kind` and that there is a metadata object.
fn checked_object(resource: Resource, mut object: Value) -> Result<Value, Status> {
    let (api_version, kind) = (resource.api_version(), resource.definition().kind);
    let Some(members) = object.as_object_mut() else {
        return Err(Status::bad_request("the object provided is not a JSON object"));
    };
    for (member, wanted) in [("apiVersion", api_version.as_str()), ("kind", kind)] {
        match members.get(member).and_then(Value::as_str) {
            Some(given) if given == wanted => {}
            // Built-in kinds may leave it out, custom ones may not.
            None if !resource.definition().custom => {
                members.insert(member.to_owned(), json!(wanted));
            }
            Some(given) if member == "kind" && resource.definition().custom => {
                let why = format!("kind: Invalid value: {given:?}: must be {kind}");
                return Err(Status::invalid(resource, "", &why));
            }
            given => {
                let given = given.unwrap_or_default();
                return Err(Status::bad_request(format!(
                    "the {member} in the data ({given}) does not match the expected {member} ({wanted})"
                )));
            }
        }
    }
    match members.entry("metadata").or_insert_with(|| json!({})) {
        Value::Object(_) => Ok(object),
        _ => Err(Status::bad_request("metadata is not an object")),
    }
}

/// `metadata` of an object that went through [`checked_object`].
fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    match &mut object["metadata"] {
        Value::Object(metadata) => metadata,
        other => unreachable!("checked objects have metadata, not {other}"),
    }
}

fn check_namespace(
    resource: Resource,
    metadata: &mut Map<String, Value>,
    namespace: &str,
) -> Result<(), Status> {
    let given = metadata.get("namespace").and_then(Value::as_str).unwrap_or_default();
    if !given.is_empty() && given != namespace {
        return Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    if resource.definition().namespaced {
        metadata.insert("namespace".to_owned(), json!(namespace));
    }
    Ok(())
}

fn uid_conflict(resource: Resource, name: &str, asked: &str, found: &str) -> Status {
    let why = format!("Precondition failed: UID in precondition: {asked}, UID in object meta: {found}");
    Status::conflict(resource, name, &why)
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty())
}

fn differs_outside_metadata(a: &Value, b: &Value) -> bool {
    let (Some(a), Some(b)) = (a.as_object(), b.as_object()) else { return true };
    let outside = |(name, _): &(&String, &Value)| name.as_str() != "metadata";
    !a.iter().filter(outside).eq(b.iter().filter(outside))
}

fn raise_generation(metadata: &mut Map<String, Value>) {
    if let Some(generation) = metadata.get("generation").and_then(Value::as_u64) {
        metadata.insert("generation".to_owned(), json!(generation + 1));
    }
}

fn bookmark(resource: Resource, revision: u64, initial_events_end: bool) -> WatchEvent {
    let mut metadata = json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
    if initial_events_end {
        metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    let object = json!({
        "apiVersion": resource.api_version(), "kind": resource.definition().kind, "metadata": metadata
    });
    WatchEvent { r#type: WatchType::Bookmark, object: Object::new(object) }
}

/// Changes that are remembered for watches; the API server keeps minutes, this is thousands of writes.
const HISTORY_LIMIT: usize = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    const APPLICATION: Resource = Resource::Application;

    fn store() -> Store {
        let mut store = Store::new(1, Wall { epoch_millis_at_zero: 1_790_000_000_123 });
        store.set_now(Instant::from_millis(5_000));
        store
    }

    fn application(name: &str) -> Value {
        json!({"apiVersion": "argoproj.io/v1alpha1", "kind": "Application", "metadata": {"name": name},
            "spec": {"project": "default"}})
    }

    fn create(store: &mut Store, name: &str) -> Arc<Object> {
        store.create(APPLICATION, "argocd", application(name)).unwrap()
    }

    fn merge(store: &mut Store, name: &str, patch: Value) -> Result<Arc<Object>, Status> {
        store.patch(APPLICATION, "argocd", name, PatchType::Merge, patch.to_string().as_bytes())
    }

    fn events(store: &Store, watch: &mut Watch) -> Vec<(WatchType, String, String)> {
        core::iter::from_fn(|| store.next_event(watch))
            .map(|event| {
                (event.r#type, event.object.name().to_owned(), event.object.resource_version().to_owned())
            })
            .collect()
    }

    #[test]
    fn create_fills_in_what_the_server_owns() {
        let mut store = store();
        let mut given = application("a");
        given["metadata"]["uid"] = json!("mine");
        given["metadata"]["generation"] = json!(7);
        given["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let object = store.create(APPLICATION, "argocd", given).unwrap();
        let metadata = &object.value()["metadata"];
        assert_eq!(metadata["resourceVersion"], "2");
        assert_eq!(metadata["generation"], 1);
        assert_eq!(metadata["namespace"], "argocd");
        assert_eq!(metadata["creationTimestamp"], "2026-09-21T14:13:25Z");
        assert_eq!(object.uid().len(), 36);
        assert!(!object.is_terminating());

        let code = |result: Result<Arc<Object>, Status>| result.unwrap_err().code;
        assert_eq!(code(store.create(APPLICATION, "argocd", application("a"))), 409);
        assert_eq!(code(store.create(APPLICATION, "argocd", application("A"))), 422);
        assert_eq!(code(store.create(APPLICATION, "argocd", application(""))), 422);
        assert_eq!(code(store.create(APPLICATION, "argocd", json!({"metadata": {"name": "b"}}))), 400);
        let mut elsewhere = application("b");
        elsewhere["metadata"]["namespace"] = json!("other");
        assert_eq!(code(store.create(APPLICATION, "argocd", elsewhere)), 400);
    }

    #[test]
    fn update_checks_the_resource_version_and_the_uid() {
        let mut store = store();
        let object = create(&mut store, "a");
        let mut next = object.value().clone();
        next["spec"]["project"] = json!("other");
        let updated = store.update(APPLICATION, "argocd", "a", next.clone()).unwrap();
        assert_eq!(updated.resource_version(), "3");
        assert_eq!(updated.value()["metadata"]["generation"], 2);

        let update = |store: &mut Store, object: Value| store.update(APPLICATION, "argocd", "a", object);
        assert_eq!(update(&mut store, next.clone()).unwrap_err().reason, "Conflict");
        next["metadata"]["resourceVersion"] = json!("");
        assert_eq!(update(&mut store, next).unwrap_err().code, 422);
        let mut other_uid = updated.value().clone();
        other_uid["metadata"]["uid"] = json!("other");
        assert_eq!(update(&mut store, other_uid).unwrap_err().code, 409);

        let unchanged = update(&mut store, updated.value().clone()).unwrap();
        assert_eq!(unchanged.resource_version(), "3", "nothing changed, nothing written");

        // Built-in kinds may be updated unconditionally.
        let secret = json!({"metadata": {"name": "s"}, "data": {}});
        store.create(Resource::Secret, "argocd", secret.clone()).unwrap();
        let mut next = secret;
        next["data"]["k"] = json!("dg==");
        assert!(store.update(Resource::Secret, "argocd", "s", next).is_ok());
    }

    #[test]
    fn patches() {
        let mut store = store();
        let object = create(&mut store, "a");
        let patch = |store: &mut Store, patch: Value| {
            store.patch(APPLICATION, "argocd", "a", PatchType::Json, patch.to_string().as_bytes())
        };
        let version =
            |version: &str| json!({"op": "replace", "path": "/metadata/resourceVersion", "value": version});
        let edit = json!({"op": "add", "path": "/metadata/annotations", "value": {"a": "b"}});
        let patched = patch(&mut store, json!([version(object.resource_version()), edit])).unwrap();
        assert_eq!(patched.value()["metadata"]["annotations"]["a"], "b");
        assert_eq!(patched.value()["metadata"]["generation"], 1, "metadata does not count");
        assert_eq!(patch(&mut store, json!([version("2"), edit])).unwrap_err().code, 409);
        let test = json!({"op": "test", "path": "/spec/project", "value": "nope"});
        assert_eq!(patch(&mut store, json!([test])).unwrap_err().code, 422);
        assert_eq!(patch(&mut store, json!({})).unwrap_err().code, 400);
        let uid = json!({"op": "replace", "path": "/metadata/uid", "value": "x"});
        assert_eq!(patch(&mut store, json!([uid])).unwrap_err().code, 422);
        let deleting =
            json!({"op": "add", "path": "/metadata/deletionTimestamp", "value": "2026-01-01T00:00:00Z"});
        assert_eq!(patch(&mut store, json!([deleting])).unwrap_err().code, 422);

        let merged = merge(&mut store, "a", json!({"status": {"sync": {"status": "Synced"}}})).unwrap();
        assert_eq!(merged.value()["status"]["sync"]["status"], "Synced");
        assert_eq!(
            merge(&mut store, "a", json!({"metadata": {"resourceVersion": "2"}})).unwrap_err().code,
            409
        );
        assert_eq!(merge(&mut store, "b", json!({})).unwrap_err().code, 404);
    }

    #[test]
    fn deletes_honour_preconditions_and_finalizers() {
        let mut store = store();
        let object = create(&mut store, "a");
        let uid = |uid: &str| Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let delete =
            |store: &mut Store, preconditions| store.delete(APPLICATION, "argocd", "a", &preconditions);
        assert_eq!(delete(&mut store, uid("x")).unwrap_err().code, 409);
        let stale = Preconditions { uid: None, resource_version: Some("1".to_owned()) };
        assert_eq!(delete(&mut store, stale).unwrap_err().code, 409);
        merge(&mut store, "a", json!({"metadata": {"finalizers": ["x", "y"]}})).unwrap();

        let Deleted::Terminating(held) = delete(&mut store, uid(object.uid())).unwrap() else {
            panic!("finalizers hold it")
        };
        assert_eq!(held.value()["metadata"]["deletionTimestamp"], "2026-09-21T14:13:25Z");
        assert_eq!(held.value()["metadata"]["generation"], 2);
        let before = store.revision();
        assert!(matches!(delete(&mut store, Preconditions::default()), Ok(Deleted::Terminating(_))));
        assert_eq!(store.revision(), before, "a second delete changes nothing");

        let more = merge(&mut store, "a", json!({"metadata": {"finalizers": ["x", "z"]}}));
        assert_eq!(more.unwrap_err().code, 422);
        let kept =
            merge(&mut store, "a", json!({"metadata": {"deletionTimestamp": null, "finalizers": ["y"]}}));
        assert!(kept.unwrap().is_terminating(), "a deletionTimestamp cannot be taken back");

        let mut watch = store
            .watch(
                APPLICATION,
                None,
                &WatchOptions { resource_version: store.revision().to_string(), ..WatchOptions::default() },
            )
            .unwrap();
        merge(&mut store, "a", json!({"metadata": {"finalizers": null}})).unwrap();
        let event = store.next_event(&mut watch).unwrap();
        assert_eq!(event.r#type, WatchType::Deleted);
        assert_eq!(event.object.resource_version(), store.revision().to_string());
        assert_eq!(event.object.value()["metadata"]["finalizers"], json!(["y"]), "the last stored state");
        assert_eq!(store.get(APPLICATION, "argocd", "a").unwrap_err().code, 404);
    }

    #[test]
    fn pages_are_of_one_moment() {
        let mut store = store();
        for name in ["a", "b", "c", "d.e"] {
            create(&mut store, name);
        }
        let mut options = ListOptions { limit: 2, ..ListOptions::default() };
        let first = store.list(APPLICATION, Some("argocd"), &options).unwrap();
        assert_eq!((first.items.len(), first.remaining), (2, Some(2)));

        store.delete(APPLICATION, "argocd", "c", &Preconditions::default()).unwrap();
        create(&mut store, "bb");
        merge(&mut store, "d.e", json!({"spec": {"project": "other"}})).unwrap();
        options.r#continue = first.r#continue;
        let second = store.list(APPLICATION, Some("argocd"), &options).unwrap();
        let names: Vec<_> = second.items.iter().map(|object| object.name()).collect();
        assert_eq!(names, ["c", "d.e"]);
        assert_eq!(second.items[1].value()["spec"]["project"], "default");
        assert_eq!((second.revision, second.r#continue.as_str()), (first.revision, ""));

        store.compact();
        create(&mut store, "e");
        assert_eq!(store.list(APPLICATION, Some("argocd"), &options).unwrap_err().code, 410);
        options.r#continue = "nonsense".to_owned();
        assert_eq!(store.list(APPLICATION, Some("argocd"), &options).unwrap_err().code, 400);
        let future = ListOptions { resource_version: "999".to_owned(), ..ListOptions::default() };
        assert_eq!(store.list(APPLICATION, None, &future).unwrap_err().code, 504);
    }

    #[test]
    fn watches() {
        let mut store = store();
        create(&mut store, "a");
        let options = |resource_version: &str, selector: &str| WatchOptions {
            selector: Selector::parse(selector, "").unwrap(),
            resource_version: resource_version.to_owned(),
            bookmarks: true,
            initial_events: false,
        };
        let mut all = store.watch(APPLICATION, Some("argocd"), &options("1", "")).unwrap();
        let mut selected = store.watch(APPLICATION, None, &options("2", "l=1")).unwrap();
        let mut other = store.watch(APPLICATION, Some("elsewhere"), &options("1", "")).unwrap();
        merge(&mut store, "a", json!({"metadata": {"labels": {"l": "1"}}})).unwrap();
        merge(&mut store, "a", json!({"spec": {"project": "other"}})).unwrap();
        merge(&mut store, "a", json!({"metadata": {"labels": {"l": null}}})).unwrap();
        store.delete(APPLICATION, "argocd", "a", &Preconditions::default()).unwrap();

        use WatchType::{Added, Deleted, Modified};
        let event = |r#type, version: &str| (r#type, "a".to_owned(), version.to_owned());
        assert_eq!(
            events(&store, &mut all),
            [
                event(Added, "2"),
                event(Modified, "3"),
                event(Modified, "4"),
                event(Modified, "5"),
                event(Deleted, "6")
            ]
        );
        assert_eq!(
            events(&store, &mut selected),
            [event(Added, "3"), event(Modified, "4"), event(Deleted, "5")]
        );
        assert_eq!(events(&store, &mut other), []);
        let bookmark = store.bookmark(&other).unwrap();
        assert_eq!(bookmark.object.resource_version(), "6");

        create(&mut store, "b");
        assert!(store.bookmark(&other).is_none(), "only what was seen is bookmarked");
        store.compact();
        let error = store.next_event(&mut other).unwrap();
        assert_eq!((error.r#type, &error.object.value()["code"]), (WatchType::Error, &json!(410)));
        assert!(store.next_event(&mut other).is_none());
        assert_eq!(store.watch(APPLICATION, None, &options("99", "")).unwrap_err().code, 504);
    }

    #[test]
    fn initial_events_end_with_a_bookmark() {
        let mut store = store();
        create(&mut store, "a");
        let options = WatchOptions { initial_events: true, bookmarks: true, ..WatchOptions::default() };
        let mut watch = store.watch(APPLICATION, None, &options).unwrap();
        create(&mut store, "b");
        let seen: Vec<_> = core::iter::from_fn(|| store.next_event(&mut watch)).collect();
        let types: Vec<_> = seen.iter().map(|event| event.r#type).collect();
        assert_eq!(types, [WatchType::Added, WatchType::Bookmark, WatchType::Added]);
        assert_eq!(seen[1].object.value()["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
        assert_eq!(
            String::from_utf8(seen[1].line()).unwrap().trim_end(),
            r#"{"type":"BOOKMARK","object":{"apiVersion":"argoproj.io/v1alpha1","kind":"Application","metadata":{"annotations":{"k8s.io/initial-events-end":"true"},"creationTimestamp":null,"resourceVersion":"2"}}}"#
        );
    }

    #[test]
    fn same_seed_same_bytes() {
        let run = || {
            let mut store = store();
            create(&mut store, "a");
            create(&mut store, "b").json().to_vec()
        };
        assert_eq!(run(), run());
    }
}
