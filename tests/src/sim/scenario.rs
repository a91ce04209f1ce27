//! What happens in one run: a list of steps that follows from the seed alone, so that steps can be left out.

use std::fmt;

use agent_core::rand::Rng;

use super::content;
use super::model::Version;

/// One of the two clusters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Side {
    Hub,
    Edge,
}

impl Side {
    pub const BOTH: [Self; 2] = [Self::Hub, Self::Edge];

    pub const fn other(self) -> Self {
        match self {
            Self::Hub => Self::Edge,
            Self::Edge => Self::Hub,
        }
    }

    pub(super) const fn index(self) -> usize {
        match self {
            Self::Hub => 0,
            Self::Edge => 1,
        }
    }
}

/// How an API server fails a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// 500, nothing done.
    Error,
    /// 429 with `Retry-After`.
    TooMany,
    /// Done, but the answer is lost.
    LostAnswer,
    /// Neither done nor answered.
    LostRequest,
    /// Answered late.
    Slow,
    /// Refused for good, this time.
    Refused,
}

/// How an API server fails a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ListFault {
    Fails,
    /// 200 without items.
    Empty,
}

/// Something that somebody does, or that breaks. Where it makes no sense (an update of what is not there), it does nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Hub users.
    Create {
        app: u8,
        value: u32,
        finalizer: bool,
    },
    Update {
        app: u8,
        value: u32,
    },
    Metadata {
        app: u8,
        value: u32,
    },
    Operation {
        app: u8,
        id: u32,
    },
    Terminate {
        app: u8,
    },
    Refresh {
        app: u8,
    },
    Delete {
        app: u8,
    },
    /// Delete and create under the same name at once.
    Recreate {
        app: u8,
        value: u32,
    },
    /// Edge users.
    EdgeEdit {
        app: u8,
        value: u32,
    },
    EdgeDelete {
        app: u8,
    },
    /// Removes the mark of origin.
    EdgeUnmark {
        app: u8,
    },
    /// An Application of the site's own.
    EdgeLocal {
        number: u8,
    },
    /// The same under a name that the hub may use later.
    EdgeSquat {
        app: u8,
    },
    /// What the controller finds in the cluster changes.
    Health {
        app: u8,
        healthy: bool,
    },
    /// Destination mapping: it becomes another agent's, or this one's again.
    Move {
        app: u8,
        away: bool,
    },
    /// Projects, repositories and keys.
    Content(content::Action),
    Cut {
        millis: u64,
    },
    Crash {
        side: Side,
        millis: u64,
    },
    Api {
        side: Side,
        fault: Fault,
        calls: u8,
    },
    List {
        side: Side,
        fault: ListFault,
    },
    /// One frame to this side is acknowledged and not carried out.
    Swallow {
        side: Side,
    },
    BreakWatch {
        side: Side,
    },
    Compact {
        side: Side,
    },
}

/// An action and its time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    pub at: u64,
    pub action: Action,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>7}.{:03} s  {:?}", self.at / 1000, self.at % 1000, self.action)
    }
}

/// What a run emphasises. Every family has every kind of trouble.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// All of it evenly.
    Mixed,
    /// Deletions and names used again.
    Deletes,
    /// Operations, terminations, refreshes.
    Operations,
    /// API servers in trouble.
    Api,
    /// Local edits and deletions on the site.
    Drift,
    /// Our principal with an agent of the reference; the steps are those of the families above in turn.
    RModel,
}

/// Which halves sit where, the hub's first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pairing {
    OursOurs,
    OursModel(Version),
}

impl Pairing {
    /// Where the reference's half sits.
    pub const fn foreign(self) -> Option<Side> {
        match self {
            Self::OursOurs => None,
            Self::OursModel(_) => Some(Side::Edge),
        }
    }
}

impl Family {
    pub const ALL: [Self; 6] =
        [Self::Mixed, Self::Deletes, Self::Operations, Self::Api, Self::Drift, Self::RModel];
    /// Those of our own pair, by what they emphasise.
    pub const STEPS: [Self; 5] = [Self::Mixed, Self::Deletes, Self::Operations, Self::Api, Self::Drift];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Deletes => "deletes",
            Self::Operations => "operations",
            Self::Api => "api",
            Self::Drift => "drift",
            Self::RModel => "r-model",
        }
    }

    /// Which halves meet in the run of a seed.
    pub const fn pairing(self, seed: u64) -> Pairing {
        let version = if turn(seed).is_multiple_of(2) { Version::Head } else { Version::V0_9_0 };
        match self {
            Self::RModel => Pairing::OursModel(version),
            _ => Pairing::OursOurs,
        }
    }

    /// The family whose steps are played.
    const fn steps(self, seed: u64) -> Self {
        match self {
            Self::RModel => Self::STEPS[(turn(seed) / 2 % 5) as usize],
            own => own,
        }
    }

    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.as_str() == word)
    }

    /// Weights of create, update, metadata, operation, terminate, refresh, delete, recreate, edge edit, edge delete,
    /// unmark, local, squat, health.
    const fn weights(self) -> [u64; 14] {
        match self {
            Self::Mixed | Self::RModel => [14, 20, 6, 16, 4, 6, 8, 5, 8, 4, 2, 1, 2, 8],
            Self::Deletes => [26, 10, 3, 6, 1, 2, 20, 16, 4, 6, 2, 1, 4, 4],
            Self::Operations => [10, 8, 3, 40, 12, 14, 4, 3, 2, 2, 1, 1, 1, 4],
            Self::Api => [14, 22, 6, 14, 3, 5, 8, 5, 6, 4, 1, 1, 2, 8],
            Self::Drift => [12, 14, 4, 8, 2, 4, 6, 4, 26, 16, 6, 2, 4, 4],
        }
    }
}

/// The steps of one seed: at least 20 Applications, 200 operations of users, 3 cuts, one crash of each half.
pub fn generate(seed: u64, family: Family) -> Vec<Step> {
    let family = family.steps(seed);
    let mut rng = Rng::new(seed ^ SCENARIO);
    let apps = 20 + rng.below(10);
    let mut steps = Vec::with_capacity(320);
    let mut at = 0;
    for app in 0..apps {
        at += rng.below(600);
        let finalizer = rng.below(2) == 0;
        steps.push(Step {
            at,
            action: Action::Create { app: app as u8, value: rng.next_u64() as u32 % 1000, finalizer },
        });
    }
    let weights = family.weights();
    let total: u64 = weights.iter().sum();
    let users = 200 + rng.below(60);
    for number in 0..users {
        // Bursts and pauses.
        at += if rng.below(3) == 0 { rng.below(2500) } else { rng.below(400) };
        let mut ticket = rng.below(total);
        let choice = weights.iter().position(|weight| {
            let chosen = ticket < *weight;
            ticket = ticket.saturating_sub(*weight);
            chosen
        });
        let app = rng.below(apps + 4) as u8;
        let value = 1000 + number as u32;
        let action = match choice {
            Some(0) => Action::Create { app, value, finalizer: rng.below(2) == 0 },
            Some(1) => Action::Update { app, value },
            Some(2) => Action::Metadata { app, value },
            Some(3) => Action::Operation { app, id: value },
            Some(4) => Action::Terminate { app },
            Some(5) => Action::Refresh { app },
            Some(6) => Action::Delete { app },
            Some(7) => Action::Recreate { app, value },
            Some(8) => Action::EdgeEdit { app, value },
            Some(9) => Action::EdgeDelete { app },
            Some(10) => Action::EdgeUnmark { app },
            Some(11) => Action::EdgeLocal { number: rng.below(4) as u8 },
            Some(12) => Action::EdgeSquat { app },
            _ => Action::Health { app, healthy: rng.below(2) == 0 },
        };
        steps.push(Step { at, action });
    }
    let end = at;
    // Of another stream of numbers: what is generated for Applications does not depend on it.
    let mut others = Rng::new(seed ^ SCENARIO ^ 1);
    for number in 0..30 + others.below(20) {
        let early = if number < 12 { 8_000 } else { end };
        let at = others.below(early);
        let value = 1000 + number as u32;
        steps.push(Step { at, action: Action::Content(content::Action::draw(&mut others, value)) });
    }
    let mut trouble = |rng: &mut Rng, action: Action| steps.push(Step { at: 2000 + rng.below(end), action });
    for _ in 0..3 + rng.below(3) {
        let longest = if rng.below(2) == 0 { 8_000 } else { 45_000 };
        let millis = 500 + rng.below(longest);
        trouble(&mut rng, Action::Cut { millis });
    }
    for side in Side::BOTH {
        for _ in 0..1 + rng.below(2) {
            let millis = 200 + rng.below(20_000);
            trouble(&mut rng, Action::Crash { side, millis });
        }
    }
    let bursts = if family == Family::Api { 14 } else { 5 };
    for _ in 0..bursts {
        let side = if rng.below(2) == 0 { Side::Hub } else { Side::Edge };
        let fault = match rng.below(12) {
            0..=2 => Fault::Error,
            3 => Fault::TooMany,
            4..=6 => Fault::LostAnswer,
            7..=8 => Fault::LostRequest,
            9..=10 => Fault::Slow,
            _ => Fault::Refused,
        };
        let calls = 1 + rng.below(8) as u8;
        trouble(&mut rng, Action::Api { side, fault, calls });
    }
    for _ in 0..1 + rng.below(3) {
        let side = if rng.below(2) == 0 { Side::Hub } else { Side::Edge };
        let action = match rng.below(4) {
            0 => Action::List { side, fault: ListFault::Fails },
            1 => Action::List { side, fault: ListFault::Empty },
            2 => Action::BreakWatch { side },
            _ => Action::Compact { side },
        };
        trouble(&mut rng, action);
    }
    for _ in 0..6 {
        let (app, away) = (others.below(apps) as u8, others.below(2) == 0);
        trouble(&mut others, Action::Move { app, away });
    }
    if others.below(3) == 0 {
        let side = if others.below(2) == 0 { Side::Hub } else { Side::Edge };
        trouble(&mut others, Action::Swallow { side });
    }
    if family == Family::Deletes && rng.below(2) == 0 {
        // Many at once while the principal is away: only a resync can tell the site.
        let at = 5_000 + rng.below(end);
        steps.push(Step { at, action: Action::Crash { side: Side::Hub, millis: 8_000 } });
        let first = rng.below(apps);
        for number in 0..8 + rng.below(6) {
            let app = ((first + number) % apps) as u8;
            steps.push(Step { at: at + 200 + number * 100, action: Action::Delete { app } });
        }
    }
    // Stable: what was generated first for a moment happens first.
    steps.sort_by_key(|step| step.at);
    steps
}

/// Counts on within a family, whether its seeds are dealt out among all families or run one after the other.
const fn turn(seed: u64) -> u64 {
    seed / Family::ALL.len() as u64 + seed % Family::ALL.len() as u64
}

/// Keeps the generator of steps apart from the world's.
const SCENARIO: u64 = 0x5ce0_a110_5ce0_a110;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_seed_has_its_share() {
        for seed in 0..200 {
            for family in Family::ALL {
                let steps = generate(seed, family);
                let count =
                    |test: fn(&Action) -> bool| steps.iter().filter(|step| test(&step.action)).count();
                assert!(count(|action| matches!(action, Action::Create { .. })) >= 20);
                assert!(count(|action| matches!(action, Action::Cut { .. })) >= 3);
                assert!(count(|action| matches!(action, Action::Crash { side: Side::Hub, .. })) >= 1);
                assert!(count(|action| matches!(action, Action::Crash { side: Side::Edge, .. })) >= 1);
                assert!(steps.len() >= 230);
                assert!(steps.is_sorted_by_key(|step| step.at));
            }
        }
        assert_eq!(generate(7, Family::Mixed), generate(7, Family::Mixed));
    }
}
