//! Lists and watches as the reference does them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use agent_core::informer::End;
use agent_core::request::Kind;
use serde_json::Value;

use super::desk::{Desk, Piece};
use super::value::{name_of, version_of};
use crate::sim::half::{Lapse, Until};

/// What a handler is told.
#[derive(Clone, Debug)]
pub(super) enum News {
    Added(Rc<Value>),
    /// The state before and after.
    Changed(Rc<Value>),
    Gone(Rc<Value>),
}

/// The watched objects of one kind, and what its handlers have not been told yet.
#[derive(Debug)]
pub(super) struct Informer {
    kind: Kind,
    path: String,
    admits: fn(&Value) -> bool,
    /// Whether a watch goes on where the one before ended. If not, everything that exists is shown again.
    resumes: bool,
    /// Lost by a watch that was down: how this half's lapses are called, and what mends them.
    missed: (&'static str, Until),
    store: RefCell<BTreeMap<String, Rc<Value>>>,
    news: RefCell<VecDeque<News>>,
    synced: Cell<bool>,
}

impl Informer {
    pub(super) fn new(kind: Kind, namespace: &str, resumes: bool, missed: (&'static str, Until)) -> Rc<Self> {
        let collection = format!("{}/namespaces/{namespace}/{}", kind.api_path(), kind.plural());
        Rc::new(Self {
            kind,
            path: format!("{collection}?labelSelector={NOT_IGNORED}"),
            admits: match kind {
                Kind::Application | Kind::AppProject => |_| true,
                Kind::Repository => is_repository,
                Kind::GpgKey => |object| name_of(object) == agent_core::content::GPG_KEYS,
            },
            resumes,
            missed,
            store: RefCell::default(),
            news: RefCell::default(),
            synced: Cell::new(false),
        })
    }

    /// What the watch said last of an object.
    pub(super) fn get(&self, name: &str) -> Option<Rc<Value>> {
        self.store.borrow().get(name).cloned()
    }

    pub(super) fn is_synced(&self) -> bool {
        self.synced.get()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.news.borrow().is_empty()
    }

    /// The next news for the handlers, which run one after the other.
    pub(super) async fn news(&self, desk: &Desk) -> News {
        desk.wait(|| self.news.borrow_mut().pop_front()).await
    }

    /// Lists and watches for ever.
    pub(super) async fn follow(self: Rc<Self>, desk: Desk) {
        loop {
            if let Some(version) = self.list(&desk).await {
                self.synced.set(true);
                self.watch(&desk, version).await;
            }
            let pause = desk.draw(|rng| rng.between(Duration::from_millis(800), Duration::from_millis(1600)));
            desk.sleep(pause).await;
        }
    }

    /// `None`: it failed.
    async fn list(&self, desk: &Desk) -> Option<String> {
        let fetch = desk.fetch(self.path.clone());
        let mut body = Vec::new();
        loop {
            match desk.piece(fetch).await {
                Piece::Bytes(bytes) => body.extend_from_slice(&bytes),
                Piece::End(End::Finished) => break,
                Piece::End(_) => return None,
            }
        }
        let list: Value = serde_json::from_slice(&body).ok()?;
        let items = list["items"].as_array()?;
        let listed: BTreeMap<String, Rc<Value>> =
            items.iter().map(|item| (name_of(item).to_owned(), Rc::new(item.clone()))).collect();
        let lost: Vec<Rc<Value>> = {
            let store = self.store.borrow();
            store.iter().filter(|(name, _)| !listed.contains_key(*name)).map(|(_, old)| old.clone()).collect()
        };
        for old in lost {
            // It is told as an object of unknown last state, which no handler understands.
            self.store.borrow_mut().remove(name_of(&old));
            self.miss(desk, &old);
        }
        for object in listed.into_values() {
            self.present(object);
        }
        Some(version_of(&list).to_owned())
    }

    async fn watch(&self, desk: &Desk, listed: String) {
        let mut last = listed;
        loop {
            let from = if self.resumes { format!("&resourceVersion={last}") } else { String::new() };
            let fetch = desk.fetch(format!("{}&watch=true{from}", self.path));
            let mut shown: Option<Vec<String>> = (!self.resumes).then(Vec::new);
            let mut buffer = Vec::new();
            let end = loop {
                match desk.piece(fetch).await {
                    Piece::Bytes(bytes) => buffer.extend_from_slice(&bytes),
                    Piece::End(end) => break end,
                }
                let whole = buffer.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                let lines: Vec<u8> = buffer.drain(..whole).collect();
                let mut expired = false;
                for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                    let mut event: Value = serde_json::from_slice(line).unwrap_or_default();
                    let object = Rc::new(event["object"].take());
                    match event["type"].as_str() {
                        Some("ADDED" | "MODIFIED") => {
                            if let Some(shown) = &mut shown {
                                shown.push(name_of(&object).to_owned());
                            }
                            last = version_of(&object).to_owned();
                            self.present(object);
                        }
                        Some("DELETED") => {
                            last = version_of(&object).to_owned();
                            self.gone(object);
                        }
                        _ => expired = true,
                    }
                }
                if let Some(shown) = shown.take() {
                    // What was there before and is not shown again ended while nobody watched: nobody hears of it.
                    self.unseen(desk, &shown);
                }
                if expired {
                    break End::Broken("expired".to_owned());
                }
            };
            if end != End::Finished {
                return;
            }
        }
    }

    fn present(&self, object: Rc<Value>) {
        let old = self.store.borrow_mut().insert(name_of(&object).to_owned(), object.clone());
        let admitted = (self.admits)(&object);
        let news = match old.filter(|old| (self.admits)(old)) {
            Some(_) if admitted => News::Changed(object),
            Some(old) => News::Gone(old),
            None if admitted => News::Added(object),
            None => return,
        };
        self.news.borrow_mut().push_back(news);
    }

    fn gone(&self, object: Rc<Value>) {
        self.store.borrow_mut().remove(name_of(&object));
        if (self.admits)(&object) {
            self.news.borrow_mut().push_back(News::Gone(object));
        }
    }

    fn unseen(&self, desk: &Desk, shown: &[String]) {
        let lost: Vec<Rc<Value>> = {
            let store = self.store.borrow();
            store.iter().filter(|(name, _)| !shown.contains(name)).map(|(_, old)| old.clone()).collect()
        };
        for old in lost {
            self.miss(desk, &old);
        }
    }

    fn miss(&self, desk: &Desk, object: &Value) {
        if (self.admits)(object) {
            desk.count("model_missed_ends");
            let (rule, until) = self.missed;
            desk.lapse(Lapse { kind: self.kind, name: name_of(object).to_owned(), rule, until });
        }
    }
}

fn is_repository(object: &Value) -> bool {
    let kind = object["metadata"]["labels"][agent_core::content::SECRET_TYPE].as_str();
    matches!(kind, Some("repository" | "repo-creds"))
        && object["data"]["project"].as_str().is_some_and(|project| !project.is_empty())
}

const NOT_IGNORED: &str = "argocd-agent.argoproj-labs.io/ignore-sync!=true";
